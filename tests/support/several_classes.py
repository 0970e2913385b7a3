"""Small runs with more than two classes: data of two parties, and their settings files."""

from pathlib import Path

import numpy as np
import yaml

from tests.support.runs import ACTIVE, CONTRACT, PASSIVE

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
    (folder / "active.csv").write_text(
        "id,label,number,own1,own2\n"
        + "".join(
            f"{ids[i]},{CLASSES[places[i]]},{places[i]},{x[i, 5]},{x[i, 6]}\n" for i in active
        )
    )
    (folder / "passive.csv").write_text(
        "id,x1,x2,x3,x4,x5\n"
        + "".join(f"{ids[i]},{','.join(str(v) for v in x[i, :5])}\n" for i in passive)
    )
    source = {"source": {"kind": "csv", "path": "active.csv"}, "id_column": "id"}
    labels = {**source, "label_column": "label", "classes": list(CLASSES)}
    monitor = {"attacks": list(ATTACKS), "queue_batches": 1024, "max_cpu_share": None}
    settings = {
        "contract": CONTRACT,
        "active": {
            **ACTIVE,
            "data": {**labels, "features": {"numeric": "own*"}},
            "leak_monitor": monitor,
        },
        "passive": {**PASSIVE, "adversary": {**monitor, "labels": labels}},
    }
    for name, values in settings.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
