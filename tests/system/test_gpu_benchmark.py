"""The GPU benchmark without a GPU: what it counts, and that its parts run."""

import pytest
import torch

from benchmarks.gpu import CountingReads, steps
from benchmarks.gpu import main as measure_gpu

CPU = torch.device("cpu")


def test_reads_are_counted_by_name_and_only_of_tensors_on_the_device() -> None:
    """A tensor elsewhere does not count; one that only computes does not either."""
    values = torch.arange(4.0)
    with CountingReads(CPU) as reads:
        total = (values * 2).sum()
        assert float(total) == 12
        assert bool(total > 0)
        assert values.tolist() == [0, 1, 2, 3]
        assert total.item() == 12
    assert reads.counts == {"float": 1, "bool": 1, "tolist": 1, "item": 1}
    with CountingReads(torch.device("cuda")) as elsewhere:
        float(total)
    assert not elsewhere.counts


def test_the_reads_of_a_step_are_counted_in_a_whole_run() -> None:
    """A step reads something, as the finiteness of the gradient, and not a value for each row."""
    assert 1 <= float(steps(CPU, 64).found.split()[0]) < 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="is of a host without a GPU")
def test_a_host_without_a_gpu_is_told_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--repeats", "1"])
    with pytest.raises(SystemExit) as stopped:
        measure_gpu()
    assert stopped.value.code == 2
    assert "use --device cpu" in capsys.readouterr().err
