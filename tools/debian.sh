#!/usr/bin/env bash
# Debian packages in a folder, from the mirror that apt has; the system stays as it is, and root is not needed.
#   tools/debian.sh SUITE FOLDER PACKAGE...            unpacked there; of another Debian too: Docker of 13 on a machine with 12
#   tools/debian.sh SUITE FOLDER --source PACKAGE...   the files of their source packages, not unpacked
set -euo pipefail
suite=$1 folder=$2
shift 2
state=${XDG_CACHE_HOME:-$HOME/.cache}/headway/apt/$suite
mkdir -p "$state"/{lists,archives}/partial "$folder"
: >"$state/status"
apt() {
  apt-get -qq -o Dir::Etc::SourceList="$state/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null -o Dir::State::Lists="$state/lists" \
    -o Dir::State::Status="$state/status" -o Dir::Cache="$state" -o APT::Sandbox::User="$(id -un)" "$@"
}
if [[ ! -s $state/sources.list ]]; then
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep --max-count 1 '/debian/$') ||
    { echo "apt knows no mirror of Debian" >&2; exit 1; }
  printf '%s [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n' \
    deb "$mirror" "$suite" deb-src "$mirror" "$suite" >"$state/sources.list"
fi
apt update
cd "$folder"
if [[ $1 == --source ]]; then
  apt source --download-only "${@:2}"
else
  packages=$(mktemp --directory)
  trap 'rm -r "$packages"' EXIT
  (cd "$packages" && apt download "$@")
  for package in "$packages"/*.deb; do dpkg --extract "$package" .; done
fi
