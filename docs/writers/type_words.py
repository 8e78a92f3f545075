"""Types and bounds of options in plain words, for the tables of docs/options.md."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_SINGULAR = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
_PLURAL = {
    "integer": "integers",
    "number": "numbers",
    "string": "texts",
    "boolean": "true or false",
}


def type_words(schema: Schema, definitions: Schema, *, names: Mapping[str, str] = _SINGULAR) -> str:
    """Describe what a JSON schema allows, such as "a number above 0 or null".

    Args:
        definitions: the schemas that `$ref` refers to, by name.
        names: words for the basic types: the singular, or the plural for the items of a list.
    """
    if "$ref" in schema:
        return type_words(definitions[schema["$ref"].rpartition("/")[2]], definitions, names=names)
    if "anyOf" in schema:
        options = [type_words(option, definitions, names=names) for option in schema["anyOf"]]
        return " or ".join(dict.fromkeys(options))
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return _array_words(schema, definitions)
    if schema.get("type") == "object":
        return _object_words(schema, definitions)
    return " ".join([names.get(str(schema.get("type")), "anything"), *_bound_words(schema)])


def _bound_words(schema: Schema) -> list[str]:
    words = []
    if "minimum" in schema and "maximum" in schema:
        words.append(f"from {schema['minimum']:g} to {schema['maximum']:g}")
    else:
        bounds = {
            "minimum": "of at least",
            "exclusiveMinimum": "above",
            "maximum": "at most",
            "exclusiveMaximum": "below",
        }
        limits = [f"{word} {schema[key]:g}" for key, word in bounds.items() if key in schema]
        if limits:
            words.append(" and ".join(limits))
    if "pattern" in schema:
        words.append(f"like `{schema['pattern']}`")
    if schema.get("minLength"):
        words.append("that is not empty")
    return words


def _array_words(schema: Schema, definitions: Schema) -> str:
    if "prefixItems" in schema:
        types = [type_words(item, definitions) for item in schema["prefixItems"]]
        return f"a list of {', '.join(types)}"
    items = type_words(schema.get("items", {}), definitions, names=_PLURAL)
    words = f"a list of {'different ' if schema.get('uniqueItems') else ''}{items}"
    shortest = schema.get("minItems", 0)
    if "maxItems" in schema:
        return f"{words}, {shortest} to {schema['maxItems']} of them"
    if shortest == 1:
        return f"{words}, not empty"
    return f"{words}, at least {shortest} of them" if shortest else words


def _object_words(schema: Schema, definitions: Schema) -> str:
    if schema.get("properties"):
        return f"a mapping with keys {', '.join(schema['properties'])}"
    words = "a mapping that is not empty" if schema.get("minProperties") else "a mapping"
    values = schema.get("additionalProperties")
    if isinstance(values, dict):
        words += f" to {type_words(values, definitions, names=_PLURAL)}"
    return words
