"""A party does not import pandas, and the user's own code can."""

import subprocess
import sys

import pytest

LEFT_OUT = """
import sys
from splitveil.common.party.absent_pandas import leave_pandas_out
leave_pandas_out("run")
"""

TABLES = """
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import splitveil.active_party.__main__, splitveil.passive_party.__main__
texts = pc.utf8_upper(pa.array(np.array(["a", "b"])))
print(texts.to_pylist() == ["A", "B"], pa.array([1.5, None]).to_numpy(zero_copy_only=False)[0])
print("pandas" in sys.modules)
"""

DATA_FRAMES = """
import pyarrow as pa
frame = pa.table({"x": [1, None]}).to_pandas()
import pandas as pd
print(type(frame) is pd.DataFrame, bool(frame["x"].isna()[1]))
print(pa.Table.from_pandas(frame)["x"].null_count, pa.array(frame["x"]).null_count)
"""


def test_pyarrow_imports_no_pandas_for_a_party() -> None:
    assert output_of(LEFT_OUT + TABLES) == ["True", "1.5", "False"]


def test_data_frames_can_be_made_of_tables_and_tables_of_data_frames() -> None:
    pytest.importorskip("pandas")
    assert output_of(LEFT_OUT + DATA_FRAMES) == ["True", "True", "1", "1"]


def output_of(program: str) -> list[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
