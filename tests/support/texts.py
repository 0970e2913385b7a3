"""A small tokenizer and an encoder of its tokens as files, and an example that uses both."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor, nn

from splitveil import models
from tests.support.runs import ACTIVE, CONTRACT, PASSIVE, write_table, write_yaml

ENCODER = "encoder.safetensors"
TOKENS = {"[UNK]": 0, "[CLS]": 1, "good": 2, "bad": 3, "film": 4, "plot": 5, "the": 6}


def write_tokenizer(path: Path, special: str = "[CLS]") -> None:
    """Write one that splits at spaces and puts special tokens before each text."""
    tokenizer = Tokenizer(WordLevel(TOKENS, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    known = [(name, TOKENS[name]) for name in special.split()]
    tokenizer.post_processor = processors.TemplateProcessing(f"{special} $A", None, known)
    tokenizer.enable_padding(pad_id=5)  # as many files say; the settings decide
    tokenizer.save(str(path))


class Encoder(nn.Module):
    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(num_tokens, 6)
        self.attention = nn.Linear(6, 6)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        vectors = self.embeddings(tokens)
        is_there = torch.arange(tokens.shape[1]) < lengths.clamp(min=1)
        likeness = self.attention(vectors) @ vectors.mT
        mixed = likeness.masked_fill(~is_there[:, None], -1e9).softmax(2) @ vectors
        found: Tensor = (mixed * is_there[:, :, None]).sum(1)
        return found / lengths.clamp(min=1)


class Bottom(nn.Module):
    def __init__(self, shapes: models.FeatureShapes) -> None:
        super().__init__()
        self.places = list(shapes.max_lengths)
        self.encoder = Encoder(shapes.num_tokens[0])
        self.visits = nn.EmbeddingBag(shapes.num_tokens[1], 3, mode="sum", padding_idx=0)
        self.dense = nn.Linear(9 + shapes.numeric_dim, 4)

    def forward(self, numeric: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        note, visits = torch.split(tokens, self.places, 1)
        rows = [numeric, self.encoder(note, lengths[:, :1]), self.visits(visits)]
        found: Tensor = self.dense(torch.cat(rows, dim=1)).relu()
        return found


def write_folder(folder: Path, rows: int = 240) -> None:
    """Write both parties' files: notes tell good films, and an encoder knows their words."""
    draw = np.random.default_rng(4)
    ids = [f"person-{row:03d}" for row in range(rows)]
    labels, own, x = draw.integers(0, 2, rows), draw.normal(size=rows), draw.normal(size=rows)
    notes = [
        " ".join(["the", ("bad", "good")[label], *draw.choice(["film", "plot", "odd"], count)])
        if count
        else ""
        for label, count in zip(labels, draw.integers(0, 5, rows), strict=True)
    ]
    visits = ["|".join(map(str, draw.integers(1, 9, count))) for count in draw.integers(0, 6, rows)]
    write_table(folder / "active.csv", "id,label,own1", range(rows), ids, labels, own)
    order = draw.permutation(rows)
    write_table(folder / "passive.csv", "id,x1,note,visits", order, ids, x, notes, visits)
    write_tokenizer(folder / "tokenizer.json")
    torch.manual_seed(2)
    save_file(Encoder(len(TOKENS)).state_dict(), folder / ENCODER)
    own_data: dict[str, Any] = {**PASSIVE["data"]}  # type: ignore[dict-item]
    own_data["features"] = {
        "numeric": "x*",
        "sequences": {
            "note": {"tokenizer": "tokenizer.json", "max_length": 4},
            "visits": {"num_tokens": 9, "max_length": 3},
        },
    }
    model = {
        "kind": "custom",
        "module": f"{__name__}:Bottom",
        "weights": {"encoder": ENCODER},
        "frozen": ["encoder.embeddings"],
    }
    optimizer = {"kind": "adam", "learning_rate": 0.02, "rates": {"encoder": 1e-4}}
    passive = {**PASSIVE, "data": own_data, "bottom_model": model, "optimizer": optimizer}
    write_yaml(folder, contract=CONTRACT, active=ACTIVE, passive=passive)
