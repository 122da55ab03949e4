"""The part of the provider's API description that the runner uses, and a check of values against it.

Where the whole description is at hand it is read from there; else the subset beside this file, which
`python openapi.py` writes from it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

YAML = Path(__file__).parents[4] / "shared" / "data" / "runpod-openapi-v2.yaml"
SUBSET = Path(__file__).with_name("runpod-v2-subset.json")

NEEDED = (
    "CreatePodRequest",
    "Pod",
    "ListPodsResponse",
    "ErrorResponse",
    "PodActionRequest",
    "GpuType",
    "ListGpuTypesResponse",
    "ListPodBillingResponse",
    "LogSource",
)

CHECKED = {
    *("$ref", "allOf", "anyOf", "not", "if", "then"),
    *("type", "enum", "pattern", "minimum", "minLength", "maxItems", "items"),
    *("required", "properties", "additionalProperties", "unevaluatedProperties"),
}
"""The keywords that are checked, and so the ones that the subset keeps."""

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


class Contract:
    def __init__(self, document: dict[str, Any]) -> None:
        self.schemas: dict[str, Any] = document["components"]["schemas"]

    @staticmethod
    @functools.cache
    def load() -> Contract:
        document = whole()
        return Contract(document if document is not None else json.loads(SUBSET.read_text(encoding="utf-8")))

    def check(self, schema_name: str, value: Any) -> list[str]:
        """What is wrong with the value, a line each; nothing where it is as the schema says."""
        return list(self._problems(self.schemas[schema_name], value, "$"))

    def _resolved(self, ref: str) -> Any:
        return self.schemas[ref.removeprefix("#/components/schemas/")]

    def _problems(self, schema: dict[str, Any], value: Any, at: str) -> Iterator[str]:
        if "$ref" in schema:
            yield from self._problems(self._resolved(schema["$ref"]), value, at)
        for part in schema.get("allOf", ()):
            yield from self._problems(part, value, at)
        if "anyOf" in schema and not any(self._fits(part, value) for part in schema["anyOf"]):
            tried = [problem for part in schema["anyOf"] for problem in self._problems(part, value, at)]
            yield f"{at}: fits none of its alternatives ({'; '.join(tried)})"
        if "not" in schema and self._fits(schema["not"], value):
            yield f"{at}: is what it must not be"
        if "then" in schema and self._fits(schema["if"], value):
            yield from self._problems(schema["then"], value, at)
        if "type" in schema and not _has_type(schema["type"], value):
            yield f"{at}: {json.dumps(value)} is not of type {schema['type']}"
            return
        if "enum" in schema and value not in schema["enum"]:
            yield f"{at}: {json.dumps(value)} is not one of {schema['enum']}"
        if isinstance(value, str):
            if "pattern" in schema and not re.search(schema["pattern"], value):
                yield f"{at}: {value!r} does not match {schema['pattern']}"
            if len(value) < schema.get("minLength", 0):
                yield f"{at}: shorter than {schema['minLength']}"
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if "minimum" in schema and value < schema["minimum"]:
                yield f"{at}: {value} is less than {schema['minimum']}"
        elif isinstance(value, list):
            if len(value) > schema.get("maxItems", len(value)):
                yield f"{at}: more than {schema['maxItems']} items"
            for i, item in enumerate(value):
                yield from self._problems(schema.get("items", {}), item, f"{at}[{i}]")
        elif isinstance(value, dict):
            yield from self._object_problems(schema, value, at)

    def _object_problems(self, schema: dict[str, Any], value: dict[str, Any], at: str) -> Iterator[str]:
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{at}.{name}: required"
        properties = schema.get("properties", {})
        additional = schema.get("additionalProperties", True)
        for name, item in value.items():
            if name in properties:
                yield from self._problems(properties[name], item, f"{at}.{name}")
            elif additional is False:
                yield f"{at}.{name}: additional property not allowed"
            elif isinstance(additional, dict):
                yield from self._problems(additional, item, f"{at}.{name}")
        if schema.get("unevaluatedProperties") is False:
            for name in sorted(value.keys() - self._evaluated(schema, value)):
                yield f"{at}.{name}: additional property not allowed"

    def _evaluated(self, schema: dict[str, Any], value: dict[str, Any]) -> set[str]:
        """The names that the schema says something about, here or in a part of it that holds for the value."""
        names = set(schema.get("properties", ()))
        if schema.get("additionalProperties") not in (None, False):
            names |= value.keys()
        if "$ref" in schema:
            names |= self._evaluated(self._resolved(schema["$ref"]), value)
        for part in schema.get("allOf", ()):
            names |= self._evaluated(part, value)
        for part in schema.get("anyOf", ()):
            if self._fits(part, value):
                names |= self._evaluated(part, value)
        return names

    def _fits(self, schema: dict[str, Any], value: Any) -> bool:
        return not any(self._problems(schema, value, "$"))


def _has_type(types: str | list[str], value: Any) -> bool:
    if isinstance(types, list):
        return any(_has_type(each, value) for each in types)
    if isinstance(value, bool):
        return types == "boolean"
    if types == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[types])


def whole() -> dict[str, Any] | None:
    """The whole description, or nothing where it or the reader of its format is missing."""
    try:
        import yaml
    except ImportError:
        return None
    if not YAML.exists():
        return None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document: dict[str, Any] = yaml.load(YAML.read_text(encoding="utf-8"), Loader=loader)
    return document


def subset(document: dict[str, Any]) -> dict[str, Any]:
    """The needed schemas and all that they refer to, with nothing but what is checked."""
    found: dict[str, Any] = {}
    wanted = list(NEEDED)
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = _bare(document["components"]["schemas"][name])
            refs = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(found[name]))
            wanted += refs
    return {"components": {"schemas": dict(sorted(found.items()))}}


def _bare(schema: dict[str, Any]) -> dict[str, Any]:
    bare: dict[str, Any] = {}
    for keyword in sorted(CHECKED & schema.keys()):
        content = schema[keyword]
        if keyword == "properties":  # a property may be called like a keyword
            bare[keyword] = {name: _bare(part) for name, part in sorted(content.items())}
        elif keyword in ("allOf", "anyOf"):
            bare[keyword] = [_bare(part) for part in content]
        else:
            bare[keyword] = _bare(content) if isinstance(content, dict) else content
    return bare


def written(document: dict[str, Any]) -> str:
    """The subset as it is committed: a schema a line."""
    schemas = document["components"]["schemas"].items()
    lines = ",\n".join(f"{json.dumps(name)}:{json.dumps(schema, separators=(',', ':'))}" for name, schema in schemas)
    return f'{{"components":{{"schemas":{{\n{lines}\n}}}}}}\n'


if __name__ == "__main__":
    full = whole()
    if full is None:
        raise SystemExit(f"needs PyYAML and {YAML}")
    SUBSET.write_text(written(subset(full)), encoding="utf-8")
