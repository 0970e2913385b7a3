"""Small runs with more than two classes: data of two parties, and their settings files."""

from pathlib import Path

import numpy as np

from tests.support.runs import ACTIVE, CONTRACT, PASSIVE, write_table, write_yaml

CLASSES = ("bus", "opel", "saab", "van")
ATTACKS = ("norm", "cosine", "spectral", "accumulated_spectral", "accumulated_cosine")


def write_classes(folder: Path, rows: int = 600, seed: int = 3) -> None:
    """Write data of four classes, by name, and settings; 9 in 10 rows are common."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    places = generator.choice(4, size=rows, p=[0.4, 0.3, 0.2, 0.1])
    centres = generator.normal(size=(4, 7))
    x = 1.5 * centres[places] + generator.normal(size=(rows, 7))
    ids = [f"car-{number:05d}" for number in range(rows)]
    cut = rows // 20
    active, passive = generator.permutation(rows - cut), cut + generator.permutation(rows - cut)
    own = [CLASSES[place] for place in places], places, *x.T[5:]
    write_table(folder / "active.csv", "id,label,number,own1,own2", active, ids, *own)
    write_table(folder / "passive.csv", "id,x1,x2,x3,x4,x5", passive, ids, *x.T[:5])
    source = {"source": {"kind": "csv", "path": "active.csv"}, "id_column": "id"}
    labels = {**source, "label_column": "label", "classes": list(CLASSES)}
    monitor = {"attacks": list(ATTACKS), "queue_batches": 1024, "max_cpu_share": None}
    data = {**labels, "features": {"numeric": "own*"}}
    write_yaml(
        folder,
        contract=CONTRACT,
        active={**ACTIVE, "data": data, "leak_monitor": monitor},
        passive={**PASSIVE, "adversary": {**monitor, "labels": labels}},
    )
