"""Read the experiment file as written: plain data, the line of every key, overrides, and resolved interpolation.

YAML is read as AReaL's users write it: `1e-8` is a number, `on` and `off` are words (a field that wants a truth value
still takes them), and a key given twice is an error. OmegaConf resolves `${...}`; what an interpolation points to may
also be a default that the file leaves out.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from headway.config.problems import Problem, shown
from headway.errors import InvalidInput, NotFound


class _Loader(yaml.CSafeLoader):
    """SafeLoader (on libyaml) with YAML 1.2's truth values and numbers."""


_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)", "-+0123456789"),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)",
        "-+0123456789.",
    ),
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "merge": (r"<<", "<"),
}
_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_first.replace("\0", ""), ""]
    )


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, int], list[Problem]]:
    """The file's data, the line of each dotted key (from 1), and keys that are given twice.

    Raises:
        NotFound: There is no such file.
        InvalidInput: It is not YAML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound(f"there is no experiment file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from None
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        raise InvalidInput(f"{path} is not YAML: {_describe(error)}") from None
    finally:
        loader.dispose()
    if not isinstance(data, dict) or node is None:
        raise InvalidInput(f"{path}: a mapping of keys was meant, not {shown(data)}")
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    _walk(node, "", lines, problems)
    return _with_text_keys(data), lines, problems


def _with_text_keys(value: Any) -> Any:
    """The same data; a key that YAML reads as a number or as null is the text that the file has."""
    if isinstance(value, dict):
        return {"null" if key is None else str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def _describe(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}" if mark else what


def _walk(node: yaml.Node, prefix: str, lines: dict[str, int], problems: list[Problem]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = f"{prefix}{key_node.value}"
            line = key_node.start_mark.line + 1
            if key in lines:
                problems.append(Problem(key, f"given twice, also in line {lines[key]}", line))
            lines[key] = line
            _walk(value_node, f"{key}.", lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[f"{prefix}{index}"] = item.start_mark.line + 1
            _walk(item, f"{prefix}{index}.", lines, problems)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Put each `a.b=c` into the data, in order. What cannot be placed comes back as problems."""
    problems = []
    for text in overrides:
        key, equals, value = text.lstrip("+").partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(Problem(key or text, f"an override is written `a.b=c`, not {text!r}", override=text))
            continue
        try:
            parsed = _with_text_keys(yaml.load(value, Loader=_Loader))
        except yaml.YAMLError:
            parsed = value
        if why := _assign(data, key.split("."), parsed):
            problems.append(Problem(key, why, override=text))
    return problems


def _assign(here: Any, path: list[str], value: Any) -> str | None:
    """Set the value at the path, making mappings on the way. Returns why that cannot be."""
    for depth, part in enumerate(path):
        is_last = depth == len(path) - 1
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                return f"{'.'.join(path[:depth])} is a list of {len(here)}; there is no {part!r} in it"
            index: Any = int(part)
        elif isinstance(here, dict):
            index = part
        else:
            return (
                f"{'.'.join(path[:depth])} is {here!r}, which has no keys; override it as a whole, or what it points to"
            )
        if is_last:
            here[index] = value
            return None
        if isinstance(here, dict) and here.get(index) is None:
            here[index] = {}
        here = here[index]
    return None


def take_out_scalars(data: dict[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> list[Problem]:
    """Remove what stands where a section was meant, so that it is said once and not for all that points into it."""
    problems = []
    for name, value in list(data.items()):
        under = defaults.get(name)
        if not isinstance(under, Mapping) or not under or value is None or (isinstance(value, str) and "${" in value):
            continue
        if isinstance(value, dict):
            problems += take_out_scalars(value, under, f"{prefix}{name}.")
        else:
            problems.append(Problem(f"{prefix}{name}", f"a section with keys was meant, not {shown(value)}"))
            del data[name]
    return problems


def resolve(data: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The data with every `${...}` replaced, and problems: the keys that point nowhere, which get their default."""
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(data), resolve=True, throw_on_missing=True)
        return resolved, []
    except (OmegaConfBaseException, RecursionError):
        return _resolve_over(data, defaults)


def _resolve_over(data: dict[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The same, for interpolation that points to what the file leaves out, or nowhere."""
    merged = _merged(defaults, data)
    problems: list[Problem] = []
    while True:
        try:
            container = OmegaConf.to_container(OmegaConf.create(merged), resolve=True, throw_on_missing=True)
        except RecursionError:
            raise InvalidInput("some ${...} go round in a circle: one holds a section that holds it") from None
        except OmegaConfBaseException as error:
            key = (error.full_key or "").replace("[", ".").replace("]", "")
            if not key or not _put_default(merged, defaults, key):
                raise InvalidInput(f"interpolation failed: {error.msg}") from None
            problems.append(Problem(key, _why_unresolved(error)))
            continue
        return _only(container, data), problems


def _why_unresolved(error: OmegaConfBaseException) -> str:
    if isinstance(error, MissingMandatoryValue):
        return "needs a value: the file leaves it open with `???`; give one as an override"
    return f"cannot be resolved: {str(error.msg).splitlines()[0]}"


def _put_default(here: Any, default: Any, key: str) -> bool:
    """Put the default (null where there is none) at a dotted key; false where the key is not there."""
    *parents, name = key.split(".")
    for part in parents:
        here = here[int(part)] if isinstance(here, list) else here.get(part)
        default = default.get(part) if isinstance(default, Mapping) else None
    index: Any = int(name) if isinstance(here, list) else name
    if isinstance(here, dict) and name not in here:
        return False
    here[index] = default.get(name) if isinstance(default, Mapping) else None
    return True


def _merged(under: Any, over: Any) -> Any:
    if isinstance(under, Mapping) and isinstance(over, Mapping):
        keys = [*under, *(key for key in over if key not in under)]
        return {key: _merged(under.get(key), over[key]) if key in over else under[key] for key in keys}
    if isinstance(over, Mapping):
        return {key: _merged(None, value) for key, value in over.items()}
    return [_merged(None, item) for item in over] if isinstance(over, list) else over


def _only(resolved: Any, written: Any) -> Any:
    """The part of the resolved data that is written in the file; what an interpolation points to comes whole."""
    if isinstance(resolved, dict) and isinstance(written, dict):
        return {key: _only(resolved[key], value) for key, value in written.items()}
    return resolved
