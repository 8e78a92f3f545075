"""Tools of requests: functions, tools that take free text, hosted tools, and the choice of tools."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field
from pydantic_core import from_json

from rollout.gateway.errors import GatewayError
from rollout.models.tool_calls import ToolSchema

TEXT_ARGUMENT = "input"  # the only argument of a tool that takes free text
ANY_TOOL = "*"  # stands for any tool in `ChatRequest.must_call`
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.]{1,40}")


def field_name(name: str) -> str:
    """Return the name of a field or type for metrics; "other" for a name that is no identifier."""
    return name if _FIELD_NAME.fullmatch(name) else "other"


class ToolSpec(BaseModel):
    """A tool as a program describes it."""

    type: str = "function"
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def tool_schema(self) -> ToolSchema:
        """Return the tool as models are shown it; raise GatewayError if JSON cannot express it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        try:
            json.dumps(parameters)
        except ValueError as error:
            raise GatewayError(400, f"the parameters of tool '{self.name}': {error}") from None
        return ToolSchema(name=self.name, description=self.description or "", parameters=parameters)


class TextToolFormat(BaseModel):
    """Form of the free text that a tool takes: any text, or text of a grammar."""

    type: str = "text"
    syntax: str = ""
    definition: str = ""


class TextToolSpec(BaseModel):
    """A tool that takes free text, as a program describes it."""

    name: str = Field(min_length=1)
    description: str | None = None
    format: TextToolFormat | None = None

    def tool_schema(self) -> ToolSchema:
        """Return the tool as a function of one text, with its grammar in the description."""
        argument = {"type": "string", "description": "the tool's input as plain text"}
        if self.format is not None and self.format.definition:
            argument["description"] = (
                f"text of this {self.format.syntax} grammar:\n{self.format.definition}"
            )
        parameters = {
            "type": "object",
            "properties": {TEXT_ARGUMENT: argument},
            "required": [TEXT_ARGUMENT],
        }
        return ToolSchema(name=self.name, description=self.description or "", parameters=parameters)


@dataclass(slots=True)
class RequestTools:
    """Tools of a request.

    Attributes:
        schemas: tools that the agent may call.
        text_tools: names of those that take free text.
        namespaces: namespace by the name of a tool that is in one; the name begins with it.
        unheeded: parts that the gateway ignores, as `ChatRequest.unheeded` names them: `tool.TYPE` of
            each hosted tool, which only the vendor's servers can run, and `allowed_tools`.
        must_call, parallel_calls: see `ChatRequest`.
    """

    schemas: list[ToolSchema] = field(default_factory=list)
    text_tools: set[str] = field(default_factory=set)
    namespaces: dict[str, str] = field(default_factory=dict)
    unheeded: list[str] = field(default_factory=list)
    must_call: str | None = None
    parallel_calls: bool = True

    def add_text_tool(self, spec: TextToolSpec) -> None:
        """Add a tool that takes free text."""
        self.schemas.append(spec.tool_schema())
        self.text_tools.add(spec.name)

    def leave_out(self, kind: str) -> None:
        """Record that a hosted tool of this type is left out."""
        self.unheeded.append(f"tool.{field_name(kind)}")

    def choose(self, mode: str, name: str = "") -> None:
        """Apply the request's choice of tools.

        Args:
            mode: "none", "auto", a word for any tool ("required" or "any"), or another word if the
                call must be of the tool `name`.
        """
        if mode == "none":
            self.schemas.clear()
        elif mode in ("required", "any"):
            self.must_call = ANY_TOOL
        elif mode != "auto":
            self.must_call = name or ANY_TOOL


class _NamedTool(BaseModel):
    name: str = ""


class _AllowedTools(BaseModel):
    mode: str = "auto"


class OpenAIToolChoice(BaseModel):
    """Choice of tools in OpenAI's APIs, if it is an object."""

    type: str
    name: str = ""  # in the Responses API
    mode: str = "auto"
    function: _NamedTool | None = None  # in Chat Completions
    custom: _NamedTool | None = None
    allowed_tools: _AllowedTools | None = None


def choose_openai_tools(
    tools: RequestTools, choice: str | OpenAIToolChoice | None, parallel_calls: bool | None
) -> None:
    """Apply the choice of tools of a request in one of OpenAI's APIs."""
    tools.parallel_calls = parallel_calls is not False
    if choice is None or isinstance(choice, str):
        tools.choose(choice or "auto")
    elif choice.type == "allowed_tools":
        tools.choose((choice.allowed_tools or choice).mode)
        tools.unheeded.append("allowed_tools")
    else:
        named = choice.function or choice.custom or choice
        tools.choose("tool", named.name)


def tool_arguments(arguments: str | dict[str, Any]) -> str:
    """Return the arguments of a tool call as normalized JSON.

    Args:
        arguments: a JSON object, or its text; "" is an empty object.

    Raises:
        GatewayError: the arguments are not a JSON object.
    """
    try:
        value = from_json(arguments or "{}") if isinstance(arguments, str) else arguments
        if isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
    except ValueError:  # no JSON, or an integer with more digits than Python converts
        pass
    raise GatewayError(400, "the arguments of a tool call are not a JSON object")


def text_arguments(text: str) -> str:
    """Return the arguments of a call whose tool takes free text."""
    return json.dumps({TEXT_ARGUMENT: text}, ensure_ascii=False)


def as_text_arguments(arguments: str) -> str:
    """Return a model's arguments for a tool that takes free text as one text.

    Arguments of another form are handed on as their JSON text, for the tool to complain about.
    """
    text = json.loads(arguments).get(TEXT_ARGUMENT)
    return text_arguments(text if isinstance(text, str) else arguments)


def qualified_name(namespace: str, name: str) -> str:
    """Return the name by which a model calls a tool of a namespace; "" stands for none."""
    return f"{namespace}.{name}" if namespace else name
