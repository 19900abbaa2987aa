"""Workers on made-up GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import InputError
from distill.placement import GB, Gpu, Placement, place, visible_gpus


def gpus(*free_gb: float) -> list[Gpu]:
    return [Gpu(index, int(free * GB), 80 * GB) for index, free in enumerate(free_gb)]


def placed(
    devices: list[Gpu], model_gb: float, workers: int, *, wanted: str | None = None, reserve: tuple[float, ...] = ()
) -> list[Placement]:
    return place(devices, wanted=wanted, reserve_vram=reserve, model_bytes=int(model_gb * GB), workers=workers)


def indices(placements: list[Placement]) -> list[tuple[int, ...]]:
    return [tuple(index for index, _ in placement.max_memory) for placement in placements]


@pytest.mark.parametrize(("wanted", "device"), [(None, "cpu"), ("cpu", "cpu"), ("mps", "mps")])
@pytest.mark.parametrize("workers", [1, 16])
def test_without_a_gpu_every_worker_is_on_the_named_device(wanted: str | None, device: str, workers: int) -> None:
    assert placed([], 500, workers, wanted=wanted, reserve=(4.0,)) == [Placement(device)] * workers


def test_the_cpu_is_used_where_it_is_wanted() -> None:
    assert placed(gpus(80, 80), 1, 2, wanted="cpu") == [Placement("cpu")] * 2


def test_workers_take_the_gpus_in_turn_and_share_what_is_free() -> None:
    placements = placed(gpus(24, 24, 24), 4, 5)
    assert indices(placements) == [(0,), (1,), (2,), (0,), (1,)]
    assert [placement.device for placement in placements] == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert dict(placements[0].max_memory) == {0: 12 * GB} and dict(placements[2].max_memory) == {2: 24 * GB}
    assert not any(placement.spread for placement in placements)


def test_a_full_gpu_is_passed_over() -> None:
    assert indices(placed(gpus(24, 3, 8), 4, 4)) == [(0,), (2,), (0,), (0,)]


def test_reserved_memory_is_left_alone() -> None:
    placements = placed(gpus(24, 24), 10, 2, reserve=(4, 0.5))
    assert [dict(placement.max_memory) for placement in placements] == [{0: 20 * GB}, {1: 23_500_000_000}]
    assert indices(placed(gpus(24, 24), 10, 2, reserve=(20,))) == [(1,), (1,)]
    assert indices(placed(gpus(24), 10, 1, reserve=(1, 2, 3))) == [(0,)], (
        "values for GPUs that aren't there say nothing"
    )


def test_a_named_gpu_is_the_only_one() -> None:
    assert indices(placed(gpus(24, 24), 4, 2, wanted="cuda:1")) == [(1,), (1,)]
    assert dict(placed(gpus(24, 24), 4, 1, wanted="cuda:1", reserve=(0, 6))[0].max_memory) == {1: 18 * GB}
    with pytest.raises(InputError, match=r"device: cuda:2 is not on this machine \(2 GPUs\)"):
        placed(gpus(24, 24), 4, 1, wanted="cuda:2")


def test_a_model_larger_than_a_gpu_takes_several() -> None:
    placements = placed(gpus(24, 24, 24, 24), 38, 2)
    assert indices(placements) == [(0, 1), (2, 3)]
    assert all(placement.spread for placement in placements)
    assert dict(placements[1].max_memory) == {2: 24 * GB, 3: 24 * GB}
    assert placements[1].device == "cuda:2"


def test_a_large_gpu_holds_one_whole_and_small_ones_hold_one_together() -> None:
    assert indices(placed(gpus(24, 80, 24), 38, 3)) == [(1,), (1,), (0, 2)]


def test_more_workers_than_fit_names_what_fits() -> None:
    with pytest.raises(InputError) as error:
        placed(gpus(24, 10), 8, 5, reserve=(1, 0))
    assert str(error.value) == (
        "num_inference_workers: 5, but 3 fit: the teacher needs 10.0 GB a worker; free after reserve_vram: "
        "cuda:0 23.0, cuda:1 10.0 GB; set it to 3 at most"
    )
    with pytest.raises(InputError, match=r"device: the teacher needs 102\.0 GB a worker; .*; lower reserve_vram"):
        placed(gpus(24, 24), 100, 1)


@given(
    free=st.lists(st.integers(0, 90), min_size=1, max_size=8),
    reserve=st.lists(st.integers(0, 40), max_size=10),
    model=st.integers(1, 120),
    workers=st.integers(1, 16),
)
def test_no_gpu_is_promised_twice(free: list[int], reserve: list[int], model: int, workers: int) -> None:
    devices = gpus(*free)
    try:
        placements = placed(devices, model, workers, reserve=tuple(reserve))
    except InputError:
        return
    assert len(placements) == workers
    for gpu in devices:
        promised = sum(dict(placement.max_memory).get(gpu.index, 0) for placement in placements)
        kept = reserve[gpu.index] if gpu.index < len(reserve) else 0
        assert promised <= max(0, gpu.free - kept * GB)
    for placement in placements:
        assert sum(size for _, size in placement.max_memory) >= model * GB


def test_this_machines_gpus_are_counted() -> None:
    import torch

    assert len(visible_gpus()) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
