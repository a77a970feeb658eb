"""Tools that Anthropic's clients run under names and schemas of Anthropic's, which bring neither.

Source: Anthropic's pages of the bash, text editor and memory tools, and its SDK's types.
"""

from collections.abc import Sequence

from pydantic import JsonValue

from penstock.schemas.api.anthropic import ClientTool
from penstock.schemas.api.openai import JsonObject

_TEXT: JsonObject = {"type": "string"}
_LINE: JsonObject = {"type": "integer", "minimum": 0}
_RANGE: JsonObject = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
}
_FILES: JsonObject = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _LINE,
    "view_range": _RANGE,
}
_BASH = "Run a command in a shell that keeps its state, or restart the shell."
_EDITOR = (
    "View and edit files. `view` shows a file, or its lines of `view_range`, or a folder; `create` "
    "writes `file_text`; `str_replace` puts `new_str` in place of `old_str`, which occurs once; "
    "`insert` puts text after the line `insert_line`."
)
_UNDO = " `undo_edit` takes the last edit of a file back."
_MEMORY = (
    "Keep notes in files under /memories, to be read later. `view` shows a folder or a file; "
    "`create`, `str_replace` and `insert` change one; `delete` and `rename` what is no longer true."
)
_FIRST_WITHOUT_UNDO = "20250429"  # it names the text to insert otherwise, too


def function_of(tool: ClientTool) -> JsonObject:
    """Return the function that a model knows the tool as."""
    family, _, version = tool.type.rpartition("_")
    if family == "bash":
        properties: JsonObject = {"command": _TEXT, "restart": {"type": "boolean"}}
        return _function(tool.name, _BASH, properties)
    commands = ["view", "create", "str_replace", "insert"]
    if family == "memory":
        more: JsonObject = {"insert_text": _TEXT, "old_path": _TEXT, "new_path": _TEXT}
        return _commands(tool.name, _MEMORY, [*commands, "delete", "rename"], _FILES | more)
    if version < _FIRST_WITHOUT_UNDO:
        return _commands(tool.name, _EDITOR + _UNDO, [*commands, "undo_edit"], _FILES, ["path"])
    own = _FILES | {"insert_text": _TEXT}
    return _commands(tool.name, _EDITOR, commands, own, ["path"])


def _commands(
    name: str,
    description: str,
    commands: Sequence[JsonValue],
    properties: JsonObject,
    required_names: Sequence[JsonValue] = (),
) -> JsonObject:
    command: JsonObject = {"command": {"type": "string", "enum": [*commands]}}
    return _function(name, description, command | properties, ["command", *required_names])


def _function(
    name: str, description: str, properties: JsonObject, required_names: Sequence[JsonValue] = ()
) -> JsonObject:
    parameters: JsonObject = {
        "type": "object",
        "properties": properties,
        "required": [*required_names],
    }
    return {"name": name, "description": description, "parameters": parameters}
