"""How a decoder's tensors lie in the memory of SGLang's tensor-parallel ranks, by Hugging Face name."""

import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

_FUSED = {  # SGLang's tensor -> the tensors that it stacks, in the order of the stream
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PART = {part: (fused, parts) for fused, parts in _FUSED.items() for part in parts}
_COLUMNS = ("o_proj", "down_proj")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_EXPERT_PADDING = 32  # of an expert's inner width without a GPU; DEFAULT_MOE_PADDING_SIZE in configs/update_config.py
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_VOCAB_PADDING = 64  # rows; DEFAULT_VOCAB_PADDING_SIZE in layers/vocab_parallel_embedding.py
_LAYER = re.compile(r"\.\d+\.")


class SGLangLayout:
    """Cuts full tensors for SGLang's ranks, stacks projections and experts, and pads the vocabulary (0.5.23)."""

    def __init__(
        self,
        *,
        dtype: str,
        tp: int,
        kv_heads: int,
        gpu: bool,
        vocab: int,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """`tp` ranks share out `kv_heads` heads of keys and values; where there are fewer, several hold the same.

        `ranks` are those whose shards are wanted, None for all.
        """
        self._dtype, self._tp, self._vocab = getattr(torch, dtype), tp, vocab
        self._kv_parts = min(tp, kv_heads)
        self._ranks = range(tp) if ranks is None else ranks
        self._padding = 1 if gpu else _EXPERT_PADDING
        self._parts: dict[str, dict[str, list[Tensor]]] = {}
        self._layer = ""  # whose experts are coming
        self._experts: dict[tuple[int, str], Tensor] = {}  # by number and part

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding that each rank holds, padding among them."""
        padded = self._vocab + -self._vocab % _VOCAB_PADDING
        if padded % self._tp:
            padded = self._vocab + -self._vocab % (_VOCAB_PADDING * self._tp)
        return padded // self._tp

    def add(
        self, name: str, tensor: Tensor, *, share: bool = False
    ) -> Iterator[tuple[str, Iterable[Tensor]]]:
        """Take the next tensor of a stream; gives what is whole with it, by SGLang's name, a shard for each rank.

        A `share` is what the only wanted rank has of the full tensor, as `shares` gives it.
        """
        tensor = tensor.to(self._dtype)
        stem, leaf, kind = _split(name)
        expert = _EXPERT.fullmatch(name)
        if expert:
            if expert[1] != self._layer:
                yield from self.finish()
                self._layer = expert[1]
            self._experts[int(expert[2]), expert[3]] = tensor
            return
        shares = [tensor] if share else self.shares(name, tensor)
        if leaf in _PART:
            fused, order = _PART[leaf]
            parts = self._parts.setdefault(f"{stem}.{fused}.{kind}", {})
            parts[leaf] = shares
            if len(parts) == len(order):
                yield (
                    f"{stem}.{fused}.{kind}",
                    map(torch.cat, zip(*(parts[part] for part in order), strict=True)),
                )
                del self._parts[f"{stem}.{fused}.{kind}"]
        elif name in VOCABULARY:
            yield name, (pad(rows, (0, 0, 0, self.vocab_rows - len(rows))) for rows in shares)
        else:
            yield name, shares

    def shares(self, name: str, tensor: Tensor) -> list[Tensor]:
        """What the wanted ranks have of a full tensor that is of no expert: parts of it, without padding."""
        _, leaf, kind = _split(name)
        if name in VOCABULARY:
            rows = self.vocab_rows
            return [tensor[rank * rows : (rank + 1) * rows] for rank in self._ranks]
        columns = leaf in _COLUMNS and kind == "weight"
        pieces = (
            self._kv_parts
            if leaf in ("k_proj", "v_proj")
            else self._tp
            if columns or leaf in _PART
            else 1
        )
        chunks = tensor.chunk(pieces, dim=int(columns))
        return [chunks[rank * pieces // self._tp] for rank in self._ranks]

    def finish(self) -> Iterator[tuple[str, Iterable[Tensor]]]:
        """The last layer's experts: their matrices, gate above up, with the inner width padded by zeros."""
        cuts: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self._ranks]
        for number in range(len(self._experts) // 3):
            gate, up, down = (self._experts[number, part] for part in ("gate", "up", "down"))
            padding = -len(gate) % self._padding
            gates, ups = (pad(x, (0, 0, 0, padding)).chunk(self._tp) for x in (gate, up))
            downs = pad(down, (0, padding)).chunk(self._tp, 1)
            for rank, (first, second) in zip(self._ranks, cuts, strict=True):
                first.append(torch.cat([gates[rank], ups[rank]]))
                second.append(downs[rank])
        if self._experts:
            yield f"{self._layer}.w13_weight", (torch.stack(first) for first, _ in cuts)
            yield f"{self._layer}.w2_weight", (torch.stack(second) for _, second in cuts)
        self._experts = {}


def held_by(name: str) -> str:
    """SGLang's tensor that a Hugging Face tensor becomes part of."""
    if expert := _EXPERT.fullmatch(name):
        return f"{expert[1]}.{'w2' if expert[3] == 'down' else 'w13'}_weight"
    stem, leaf, kind = _split(name)
    return f"{stem}.{_PART[leaf][0]}.{kind}" if leaf in _PART else name


def of_rank(name: str, rank: int, ranks: int) -> str:
    """What the tensor of one rank is called here."""
    return f"{name} of rank {rank}" if ranks > 1 else name


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor is part of."""
    found = _LAYER.search(name)
    return int(found[0][1:-1]) if found else None


def kind_of(name: str) -> str:
    """A tensor's name without its layer: tensors of a kind lie in an engine's memory in the same form."""
    return _LAYER.sub(".*.", name, count=1)


def _split(name: str) -> tuple[str, str, str]:
    """`model.layers.0.mlp.up_proj.weight` -> what is before up_proj, up_proj, weight."""
    stem, leaf, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", "", "")
    return stem, leaf, kind
