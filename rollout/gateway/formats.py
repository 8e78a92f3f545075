"""Reply formats: JSON that a program asks for, described in the prompt and checked in the reply."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
from pydantic_core import from_json
from referencing import Registry
from referencing.exceptions import Unresolvable

_OBJECT_INSTRUCTION = "Reply with one JSON object and with nothing else."
_SCHEMA_INSTRUCTION = (
    "Reply with one JSON value that follows this JSON schema, and with nothing else:"
)
# Errors of a check that a schema or a very deep reply causes.
_CHECK_ERRORS = (RecursionError, Unresolvable, re.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """JSON format of a reply.

    Attributes:
        schema: JSON schema of the reply; None: any JSON object.
        name: name of the format, "" if it has none.
        description: purpose of the format, "" if it has none.
    """

    schema: Mapping[str, Any] | None
    name: str = ""
    description: str = ""

    @property
    def instruction(self) -> str:
        """The format in words that are added to a prompt."""
        if self.schema is None:
            return _OBJECT_INSTRUCTION
        title = ": ".join(filter(None, (self.name, self.description)))
        schema = json.dumps(self.schema, ensure_ascii=False)
        return "\n".join(filter(None, (_SCHEMA_INSTRUCTION, title, schema)))

    def accepts(self, text: str) -> bool:
        """Return True if a reply is JSON of this format, without any text around it.

        References to other documents are not loaded, so that a schema with one accepts nothing.
        """
        try:
            value = from_json(text, allow_inf_nan=False)
        except ValueError:
            return False
        if self.schema is None:
            return isinstance(value, dict)
        validator = jsonschema.Draft202012Validator(self.schema, registry=Registry())
        try:
            return bool(validator.is_valid(value))
        except _CHECK_ERRORS:
            return False


def schema_problem(schema: Mapping[str, Any]) -> str:
    """Return the reason why a JSON schema is invalid, or ""."""
    try:
        json.dumps(schema)
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        location = "/".join(map(str, error.absolute_path))
        return f"{location}: {error.message}" if location else error.message
    except (ValueError, RecursionError) as error:
        return str(error)
    return ""
