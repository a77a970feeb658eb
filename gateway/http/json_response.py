"""Answers in JSON."""

from fastapi import Response

from penstock.gateway.openai.large_json import to_json_in_pieces


def json_response(shape: object, status: int = 200) -> Response:
    return Response(to_json_in_pieces(shape), status, media_type="application/json")
