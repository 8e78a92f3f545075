"""OpenAI's Embeddings API: requests and replies."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from rollout.gateway.dialects import parse_body

EMBEDDINGS_PATH = "/v1/embeddings"
_MAX_TEXTS = 2048


class EmbeddingsBody(BaseModel):
    """Body of a request; the encoder decides on the number of dimensions."""

    model: str = Field(min_length=1, max_length=200)
    input: str | Annotated[list[str], Field(max_length=_MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def texts(self) -> list[str]:
        """Texts to encode."""
        return [self.input] if isinstance(self.input, str) else self.input


def parse_embeddings(body: bytes) -> EmbeddingsBody:
    """Parse a request; raise GatewayError with its first problem."""
    return parse_body(EmbeddingsBody, body)


def render_embeddings(request: EmbeddingsBody, vectors: np.ndarray) -> dict[str, Any]:
    """Return the body of a reply.

    Args:
        request: the request.
        vectors: float32 vectors [texts, dimensions].
    """
    rows = []
    for index, vector in enumerate(vectors):
        embedding: str | list[float] = vector.tolist()
        if request.encoding_format == "base64":
            embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        rows.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": 0, "total_tokens": 0}  # the encoder does not report its tokens
    return {"object": "list", "data": rows, "model": request.model, "usage": usage}
