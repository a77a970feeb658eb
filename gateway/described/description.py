"""The description of all routes that /openapi.json gives, in the form of OpenAPI 3.1."""

from copy import deepcopy

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaValue

from penstock.gateway.auth.access import ADMIN, OPEN_PATHS, PATH_SCOPES
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
            route = ROUTES[f"{method.upper()} {path}"]
            _describe(operation, path, route, shapes)
            if operation["summary"].startswith("/"):  # the name of a route that many paths have
                del operation["summary"]
            _secure(operation, path)
    whole["components"] = {"schemas": shapes.definitions, "securitySchemes": _KEYS}
    if root_path:
        whole["servers"] = [{"url": root_path}]
    return whole


class Shapes:
    """Collects the JSON schemas of shapes, each under its name."""

    def __init__(self) -> None:
        self.definitions: dict[str, JsonSchemaValue] = {}

    def ref(self, shape: a.Shape) -> JsonSchemaValue:
        """Return the schema of a shape; of one that has a name, a reference to it."""
        schema = TypeAdapter(shape).json_schema(ref_template=_REF, mode="serialization")
        self.definitions |= schema.pop("$defs", {})
        if not (isinstance(shape, type) and issubclass(shape, BaseModel)):
            return schema
        self.definitions[shape.__name__] = schema
        return {"$ref": _REF.format(model=shape.__name__)}

    def body(self, *shapes: a.Shape, knows_model: bool = False) -> JsonSchemaValue:
        """Return the schema of a body that has the fields of several shapes.

        Where two have a field it is the first one's, which says what is required. What is not may
        be null: it then counts as absent.
        """
        schemas = list[JsonSchemaValue]()
        for shape in shapes:
            schema = TypeAdapter(shape).json_schema(ref_template=_REF)
            self.definitions |= schema.pop("$defs", {})
            schemas.append(schema)
        required_names = schemas[0].get("required", [])
        required_names = [name for name in required_names if not (knows_model and name == "model")]
        fields: JsonSchemaValue = {}
        for schema in reversed(schemas):
            fields |= schema["properties"]
        for name in fields.keys() - {*required_names}:
            kinds = fields[name].get("anyOf", [])
            if {"type": "null"} not in kinds:
                fields[name] = {"anyOf": [fields[name], {"type": "null"}]}
        return {"type": "object", "properties": fields, "required": required_names}


def _event(data: JsonSchemaValue) -> JsonSchemaValue:
    """Return the shape of a server-sent event, whose `data` is JSON."""
    text = {"type": "string"}
    content = {**text, "contentMediaType": "application/json", "contentSchema": data}
    fields = {"id": text, "event": text, "data": content}
    return {"type": "object", "properties": fields, "required": ["data"]}


def _describe(operation: JsonSchemaValue, path: str, route: Described, shapes: Shapes) -> None:
    content: JsonSchemaValue = {}
    if isinstance(route.answer, str):
        content[route.answer] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": shapes.ref(route.answer)}
    if route.events is not None:
        content["text/event-stream"] = {"schema": _event(shapes.ref(route.events))}
    error = shapes.ref(a.MessageErrorAnswer if path.startswith("/v1/messages") else a.ErrorAnswer)
    operation["responses"] = {
        str(route.status): {"description": "the answer", "content": content},
        **{
            status: {"description": text, "content": {"application/json": {"schema": error}}}
            for status, text in _ANY_ERROR.items()
        },
    }
    if route.bodies:
        schema = shapes.body(*route.bodies, knows_model=route.knows_model)
    else:
        bodies = [shapes.body(shape, knows_model=route.knows_model) for shape in route.any_of]
        schema = {"anyOf": bodies}
    if route.bodies or route.any_of:
        kind = "multipart/form-data" if route.is_form else "application/json"
        content = {kind: {"schema": schema}}
        operation["requestBody"] = {"required": not route.may_be_empty, "content": content}
    if (route.events is not None and operation.get("requestBody")) or route.status == 202:
        operation.setdefault("parameters", []).append(_IDEMPOTENCY)


def _secure(operation: JsonSchemaValue, path: str) -> None:
    """Say which keys open a path, and which scope they need."""
    if path in OPEN_PATHS:
        operation["security"] = []
        return
    keys: list[JsonObject] = [{name: []} for name in _KEYS]
    operation["security"] = keys if path.startswith(ADMIN) else [*keys, {}]  # {}: none was made
    scope = next((scope for start, scope in PATH_SCOPES if path.startswith(start)), "")
    sentence = f"A key needs the scope {scope}." if scope else "Any key will do."
    text = operation.get("description", "")
    operation["description"] = f"{text}\n\n{sentence}".strip()
