"""The description of all routes that /openapi.json gives, in the form of OpenAPI 3.1."""

from copy import deepcopy

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaValue

from penstock.gateway.auth.access import ADMIN, NEEDED, OPEN_PATHS
from penstock.gateway.described import answers as a
from penstock.gateway.described.table import ROUTES, Described
from penstock.schemas.api.openai import JsonObject

_REF = "#/components/schemas/{model}"
_ANY_ERROR = {"4XX": "it was refused", "5XX": "it failed, or is to be tried again"}
_KEYS: JsonObject = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_IDEMPOTENCY: JsonObject = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": 255},
    "description": "the same key and body are one job, for a day",
}


def description_of(app: FastAPI, root_path: str) -> JsonSchemaValue:
    """Describe the application's routes, whose bodies and answers `ROUTES` tells."""
    whole: JsonSchemaValue = deepcopy(app.openapi())  # FastAPI keeps its own
    shapes = Shapes()
    for path, operations in whole["paths"].items():
        for method, operation in operations.items():
            told = ROUTES[f"{method.upper()} {path}"]
            _describe(operation, path, told, shapes)
            if operation["summary"].startswith("/"):  # the name of a route that many paths have
                del operation["summary"]
            _secure(operation, path)
    whole["components"] = {"schemas": shapes.found, "securitySchemes": _KEYS}
    if root_path:
        whole["servers"] = [{"url": root_path}]
    return whole


class Shapes:
    """Collects the JSON schemas of shapes, each under its name."""

    def __init__(self) -> None:
        self.found: dict[str, JsonSchemaValue] = {}

    def ref(self, shape: a.Shape) -> JsonSchemaValue:
        """Return the schema of a shape; of one that has a name, a reference to it."""
        schema = TypeAdapter(shape).json_schema(ref_template=_REF, mode="serialization")
        self.found |= schema.pop("$defs", {})
        if not (isinstance(shape, type) and issubclass(shape, BaseModel)):
            return schema
        self.found[shape.__name__] = schema
        return {"$ref": _REF.format(model=shape.__name__)}

    def body(self, *shapes: a.Shape, knows_model: bool = False) -> JsonSchemaValue:
        """Return the schema of a body that has the fields of several shapes.

        Where two have a field it is the first one's, which says what is required. What is not may
        be null: it then counts as absent.
        """
        schemas = list[JsonSchemaValue]()
        for shape in shapes:
            schema = TypeAdapter(shape).json_schema(ref_template=_REF)
            self.found |= schema.pop("$defs", {})
            schemas.append(schema)
        required = schemas[0].get("required", [])
        required = [name for name in required if not (knows_model and name == "model")]
        fields: JsonSchemaValue = {}
        for schema in reversed(schemas):
            fields |= schema["properties"]
        for name in fields.keys() - {*required}:
            kinds = fields[name].get("anyOf", [])
            if {"type": "null"} not in kinds:
                fields[name] = {"anyOf": [fields[name], {"type": "null"}]}
        return {"type": "object", "properties": fields, "required": required}


def _event(data: JsonSchemaValue) -> JsonSchemaValue:
    """Return the shape of a server-sent event, whose `data` is JSON."""
    text = {"type": "string"}
    coded = {**text, "contentMediaType": "application/json", "contentSchema": data}
    fields = {"id": text, "event": text, "data": coded}
    return {"type": "object", "properties": fields, "required": ["data"]}


def _describe(operation: JsonSchemaValue, path: str, told: Described, shapes: Shapes) -> None:
    content: JsonSchemaValue = {}
    if isinstance(told.answer, str):
        content[told.answer] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": shapes.ref(told.answer)}
    if told.events is not None:
        content["text/event-stream"] = {"schema": _event(shapes.ref(told.events))}
    refused = shapes.ref(a.MessageErrorAnswer if path.startswith("/v1/messages") else a.ErrorAnswer)
    operation["responses"] = {
        str(told.status): {"description": "the answer", "content": content},
        **{
            status: {"description": what, "content": {"application/json": {"schema": refused}}}
            for status, what in _ANY_ERROR.items()
        },
    }
    if told.bodies:
        schema = shapes.body(*told.bodies, knows_model=told.knows_model)
    else:
        either = [shapes.body(each, knows_model=told.knows_model) for each in told.any_of]
        schema = {"anyOf": either}
    if told.bodies or told.any_of:
        kind = "multipart/form-data" if told.is_form else "application/json"
        content = {kind: {"schema": schema}}
        operation["requestBody"] = {"required": not told.may_be_empty, "content": content}
    if (told.events is not None and operation.get("requestBody")) or told.status == 202:
        operation.setdefault("parameters", []).append(_IDEMPOTENCY)


def _secure(operation: JsonSchemaValue, path: str) -> None:
    """Say which keys open a path, and which scope they need."""
    if path in OPEN_PATHS:
        operation["security"] = []
        return
    keys: list[JsonObject] = [{name: []} for name in _KEYS]
    operation["security"] = keys if path.startswith(ADMIN) else [*keys, {}]  # {}: none was made
    scope = next((scope for start, scope in NEEDED if path.startswith(start)), "")
    told = f"A key needs the scope {scope}." if scope else "Any key will do."
    described = operation.get("description", "")
    operation["description"] = f"{described}\n\n{told}".strip()
