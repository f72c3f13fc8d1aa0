#!/usr/bin/env bash
# Build programs of Kubernetes 1.20 from Debian's source package, with Debian's Go: tools/kubernetes_build.sh FOLDER PROGRAM...
# Ten minutes of CPU and 2 GB of disk on the way; what is in FOLDER is not built again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(realpath --canonicalize-missing "$1")
shift
missing=()
for program in "$@"; do [[ -x $folder/$program ]] || missing+=("k8s.io/kubernetes/cmd/$program"); done
[[ ${#missing[@]} == 0 ]] && exit 0
work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
"$here/debian.sh" bookworm "$work/go" golang-1.19-go golang-1.19-src
"$here/debian.sh" bookworm "$work" --source kubernetes
export GOROOT=$work/go/usr/lib/go-1.19 GOPATH=$work/path GOCACHE=$work/cache GO111MODULE=off CGO_ENABLED=0
PATH=$GOROOT/bin:$PATH
source=$GOPATH/src/k8s.io/kubernetes
mkdir -p "$source" "$folder"
tar --extract --file "$(echo "$work"/kubernetes_*.orig.tar.gz)" --strip-components 1 --directory "$source"
cd "$source"

# The description of the API, which its servers publish, is the one file that Kubernetes does not keep in its source.
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
described=$(grep --recursive --files-with-matches --include='*.go' '+k8s:openapi-gen=' cmd pkg staging/src/k8s.io |
  grep --invert-match --extended-regexp '_examples|code-generator|sample-apiserver|testdata|/zz_' | xargs dirname | sort --unique |
  sed 's#^staging/src#vendor#; s#^#k8s.io/kubernetes/#' | paste --serial --delimiters ,)
"$work/openapi-gen" --input-dirs "$described" --output-package k8s.io/kubernetes/pkg/generated/openapi \
  --output-file-base zz_generated.openapi --output-base "$GOPATH/src" --report-filename /dev/null \
  --go-header-file hack/boilerplate/boilerplate.generatego.txt

# What the programs say of themselves is set where it is declared.
sed --in-place --regexp-extended 's/^(\s*gitVersion\s.*=) ".*"/\1 "v1.20.2"/; s/^(\s*gitMajor\s+string).*/\1 = "1"/; s/^(\s*gitMinor\s+string).*/\1 = "20"/' \
  staging/src/k8s.io/{client-go/pkg,component-base}/version/base.go
go build -o "$work/made/" -ldflags "-s -w" "${missing[@]}"
mv "$work"/made/* "$folder"
