"""JSON schemas of pydantic models; what they expect, and what is wrong with a value, in plain words."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import CoreSchema

from rollout.base.text import nearest

Schema = Mapping[str, Any]
Keys = tuple[int | str, ...]  # keys in each other

_ONE = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
_YAML = {"None": "null", "True": "true", "False": "false"}  # values as they are written
_MANY = {"integer": "integers", "number": "numbers", "string": "texts", "boolean": "true or false"}


class _Lenient(GenerateJsonSchema):
    """A type that JSON does not know is anything."""

    def handle_invalid_for_json_schema(
        self, schema: CoreSchema, error_info: str
    ) -> JsonSchemaValue:
        try:
            return super().handle_invalid_for_json_schema(schema, error_info)
        except PydanticInvalidForJsonSchema:
            return {}


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of what `model` is made from."""
    return model.model_json_schema(schema_generator=_Lenient)


def expected(
    schema: Schema, definitions: Schema, *, names: Mapping[str, str] = _ONE, error: str = ""
) -> str:
    """What `schema` expects, such as "a number above 0 or null".

    Args:
        definitions: what its `$ref`s refer to, by name.
        names: of the basic types, for one value or for many.
        error: what pydantic calls what is wrong: infinity is a number, but no finite one.
    """
    names = {**names, "number": "a finite number"} if error == "finite_number" else names
    if "$ref" in schema:
        return expected(definitions[schema["$ref"].rpartition("/")[2]], definitions, names=names)
    if "anyOf" in schema:
        return " or ".join(
            dict.fromkeys(expected(option, definitions, names=names) for option in schema["anyOf"])
        )
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return f"one of {', '.join(map(str, values))}" if len(values) > 1 else str(values[0])
    kind = schema.get("type")
    if kind == "array":
        return "".join(_array(schema, definitions))
    if kind == "object":
        return _object(schema, definitions)
    return " ".join([names.get(str(kind), "anything"), *_bounds(schema)])


def walk(schema: Schema, place: Keys) -> tuple[Keys, Schema]:
    """As much of `place` as leads somewhere in `schema`, and the part of the schema that is there."""
    at = schema
    for number, part in enumerate(place):
        names = [
            option["propertyNames"] for option in _options(schema, at) if "propertyNames" in option
        ]
        if names and place[number + 1 :] == ("[key]",):  # pydantic's word for a key of a mapping
            return place[:number], names[0]
        inner = _inside(schema, at, part)
        if inner is None:
            return place[:number], at
        at = inner
    return place, at


def meant(details: ErrorDetails) -> Keys:
    """Where the value is that an error of pydantic is about: of a list that is too short, the list."""
    short = details["type"] == "missing" and isinstance(details["loc"][-1], int)
    return details["loc"][:-1] if short else details["loc"]


def keys_of(schema: Schema, at: Schema) -> list[str]:
    """The keys that the part `at` of `schema` knows."""
    return [key for option in _options(schema, at) for key in option.get("properties", {})]


def _options(schema: Schema, at: Schema) -> Iterator[Schema]:
    """The alternatives of `at`, with references followed."""
    if "$ref" in at:
        yield from _options(schema, schema["$defs"][at["$ref"].rpartition("/")[2]])
    elif "anyOf" in at:
        for option in at["anyOf"]:
            yield from _options(schema, option)
    else:
        yield at


def _inside(schema: Schema, at: Schema, part: int | str) -> Schema | None:
    for option in _options(schema, at):
        if part in option.get("properties", {}):
            found: Schema = option["properties"][part]
            return found
        items = option.get("prefixItems", ())
        if isinstance(part, int) and option.get("type") == "array":
            return items[part] if part < len(items) else option.get("items")
        if isinstance(part, str) and isinstance(option.get("additionalProperties"), dict):
            return option["additionalProperties"]  # type: ignore[no-any-return]
    return None


def _bounds(schema: Schema) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        yield f"from {low:g} to {high:g}"
        return
    said = [("of at least", low), ("above", above), ("at most", high), ("below", below)]
    found = [f"{word} {value:g}" for word, value in said if value is not None]
    yield from [" and ".join(found)] if found else []
    yield from [f"like {schema['pattern']}"] if "pattern" in schema else []
    yield from ["that is not empty"] if schema.get("minLength") else []


def _array(schema: Schema, definitions: Schema) -> Iterator[str]:
    if "prefixItems" in schema:
        yield f"a list of {', '.join(expected(item, definitions) for item in schema['prefixItems'])}"
        return
    different = "different " if schema.get("uniqueItems") else ""
    yield f"a list of {different}{expected(schema.get('items', {}), definitions, names=_MANY)}"
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    if high is not None:
        yield f", {low} to {high} of them"
    elif low:
        yield ", not empty" if low == 1 else f", at least {low} of them"


def _object(schema: Schema, definitions: Schema) -> str:
    if schema.get("properties"):
        return f"a mapping with keys {', '.join(schema['properties'])}"
    values = schema.get("additionalProperties")
    full = "a mapping that is not empty" if schema.get("minProperties") else "a mapping"
    return (
        f"{full} to {expected(values, definitions, names=_MANY)}"
        if isinstance(values, dict)
        else full
    )


def invalid(error: ValidationError, model: type[BaseModel], given: Collection[str] = ()) -> str:
    """Pydantic's complaints about values for `model`: every misspelt key, or else the first, of `given` dotted keys."""
    errors = error.errors()
    misspelt = [details for details in errors if details["type"] == "extra_forbidden"]
    said = dict.fromkeys(_wrong(details, model, brief=len(misspelt) > 1) for details in misspelt)
    errors.sort(key=lambda details: not ".".join(map(str, details["loc"])).startswith(tuple(given)))
    return "; ".join(said) or _wrong(errors[0], model)


def _places_of(schema: Schema, key: str) -> Iterator[str]:
    """Where in the sections of a config a key is known, dotted; `*` stands for a name."""
    for section, at in schema["properties"].items():
        for option in _options(schema, at):
            named = option.get("additionalProperties")
            if key in option.get("properties", {}):
                yield f"{section}.{key}"
            if isinstance(named, dict) and key in keys_of(schema, named):
                yield f"{section}.*.{key}"


def _wrong(first: ErrorDetails, model: type[BaseModel], *, brief: bool = False) -> str:
    """A complaint in plain words; a `brief` one of a key lists what is known only where nothing is near."""
    place, schema = ".".join(map(str, first["loc"])) or "the config", json_schema(model)
    keys, at = walk(schema, meant(first))
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return f"'{place}' is missing; expected {expected(at, schema.get('$defs', {}))}"
    if first["type"] == "value_error":
        return f"{place}: {first['msg'].removeprefix('Value error, ')}"
    message = first["msg"]
    if first["type"] != "option":  # whose message says already what was expected
        if first["type"] == "extra_forbidden":
            unknown = ".".join(map(str, first["loc"][: len(keys) + 1]))
            known = keys_of(schema, at)
            key = unknown.rpartition(".")[2]
            near = nearest(key, known)
            if not near and (places := list(_places_of(schema, key))):
                return f"unknown key '{unknown}'; write {' or '.join(places)}"
            listed = "" if brief and near else f"; known here: {', '.join(known)}"
            return f"unknown key '{unknown}'{listed}{near}"
        wanted = expected(at, schema.get("$defs", {}), error=first["type"])
        place, message = ".".join(map(str, keys)), f"expected {wanted}"
    value = first["input"]
    got = "" if isinstance(value, dict) else f" (got {_YAML.get(repr(value), repr(value))})"
    return f"{place}: {message}{got}"
