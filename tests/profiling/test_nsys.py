"""Reading nsys exports: both graph modes, what a careless reader counts wrongly, and files that are not whole."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkgrpo.profiling.nsys import read_nsys
from sparkgrpo.profiling.summarise import summarise
from sparkgrpo.profiling.timeline import TraceError

US = 1_000


def summary_of(path: Path) -> Any:
    return summarise(read_nsys(path))


def test_both_graph_modes_give_the_tables(stepped: tuple[str, Path]) -> None:
    mode, path = stepped
    summary = summary_of(path)
    assert summary.graph_mode == mode.lower() and summary.num_steps == 2
    assert (summary.step_ns, summary.phases_ns, summary.frac_unaccounted) == (2_000 * US, 2_000 * US, 0.0)
    found = {p.name: p for p in summary.phases}
    assert list(found) == ["t_gen", "t_reward", "t_train", "t_opt"]
    assert [p.wall_ns for p in found.values()] == [800 * US, 200 * US, 800 * US, 200 * US]
    assert [p.num_kernels for p in found.values()] == [12 if mode == "Node" else 0, 0, 4, 2]
    assert [p.num_replays for p in found.values()] == [4, 0, 0, 0]
    busy = 4 * 90 if mode == "Node" else 3 * 90  # one replay has no time
    assert [p.activity_busy_ns for p in found.values()] == [busy * US, 0, 240 * US, 60 * US]
    # The first step's t_gen spans both replays (60 to 290 us); in graph mode the second step's holds the first alone.
    assert found["t_gen"].device_span_ns == (230 + (230 if mode == "Node" else 90)) * US
    graphs = summary.graphs
    assert graphs.num_launches == 4 and graphs.launch_ns == 40 * US
    assert (graphs.num_opaque, graphs.num_without_time) == ((0, 0) if mode == "Node" else (4, 1))
    assert graphs.nodes_per_replay == (3 if mode == "Node" else None)
    assert graphs.median_gap_ns == 50 * US
    assert summary.unattributed.num_kernels == 0


def test_idle_time_by_cause(stepped: tuple[str, Path]) -> None:
    """t_train: 400 us a step, of which the device works 120; the two calls of 5 us lie in idle time."""
    idle = next(p.idle for p in summary_of(stepped[1]).phases if p.name == "t_train")
    assert (idle.total_ns, idle.launch_ns, idle.host_ns, idle.sync_ns) == (560 * US, 20 * US, 540 * US, 0)
    assert idle.cause == "host"


def test_sync_and_allocator_are_told_from_the_host(new_export: Callable[..., Any]) -> None:
    export = new_export()
    export.range(0, 1_000 * US, "grpo.t_gen")
    export.call(100 * US, 300 * US, "cudaStreamSynchronize_v3020")
    export.call(300 * US, 350 * US, "cudaMalloc_v3020")
    export.launch(500 * US, 600 * US)
    idle = summary_of(export.done()).phases[0].idle
    parts = (idle.sync_ns, idle.allocator_ns, idle.launch_ns, idle.host_ns)
    assert parts == (200 * US, 50 * US, 5 * US, 645 * US) and idle.total_ns == 900 * US


def test_ids_of_two_processes_collide(new_export: Callable[..., Any]) -> None:
    """The other process launches with the same correlation id, inside a phase of ours, and belongs to none."""
    export = new_export()
    export.range(0, 100 * US, "grpo.t_gen")
    export.call(10 * US, 15 * US, "cudaLaunchKernel_v7000", correlation=77)
    export.call(12 * US, 17 * US, "cuLaunchKernel", correlation=77, thread=(1 << 48) | (200 << 24) | 9)
    export.kernel(20 * US, 30 * US, 77)
    export.kernel(20 * US, 40 * US, 77, "foreign", globalPid=(1 << 48) | (200 << 24))
    summary = summary_of(export.done())
    assert summary.num_processes == 2 and summary.num_kernels_with_call == 2
    assert summary.launch_calls == {"cudaLaunchKernel": 1, "cuLaunchKernel": 1}
    assert summary.phases[0].num_kernels == 1 and summary.phases[0].kernel_sum_ns == 10 * US
    assert (summary.unattributed.num_outside, summary.unattributed.num_without_call) == (1, 0)


def test_kernels_of_a_process_without_calls(new_export: Callable[..., Any]) -> None:
    export = new_export()
    export.range(0, 100 * US, "grpo.t_gen")
    export.launch(20 * US, 30 * US)
    export.kernel(40 * US, 50 * US, export.correlation, globalPid=(1 << 48) | (300 << 24))
    assert summary_of(export.done()).unattributed.num_without_call == 1


def test_without_process_ids_only_one_process_may_have_called(new_export: Callable[..., Any]) -> None:
    """An older schema: with a second process nothing can be said, and nothing is guessed."""
    for num_processes, expected in ((1, 1), (2, None)):
        export = new_export(f"{num_processes}.sqlite", without=("globalPid",))
        export.range(0, 100 * US, "grpo.t_gen")
        export.launch(20 * US, 30 * US)
        if num_processes == 2:
            export.call(50 * US, 55 * US, "cudaFree", thread=(1 << 48) | (200 << 24) | 9)
        summary = summary_of(export.done())
        assert summary.num_kernels_with_call == expected
        assert summary.phases[0].num_kernels == expected
        assert f"{'CUPTI_ACTIVITY_KIND_KERNEL'}.globalPid" in summary.missing


def test_launched_before_the_capture_is_unattributed_by_time_too(new_export: Callable[..., Any]) -> None:
    export = new_export()
    export.range(0, 100 * US, "grpo.t_gen")
    export.launch(20 * US, 30 * US)
    export.kernel(-50 * US, 40 * US, 3)
    lost = summary_of(export.done()).unattributed
    assert (lost.num_kernels, lost.num_without_call, lost.frac_of_kernels) == (1, 1, 0.5)
    assert lost.frac_of_time == pytest.approx(0.9)


def test_open_and_other_ranges(new_export: Callable[..., Any]) -> None:
    """An open range reaches to the end of the capture; a start/end range is no stack range."""
    export = new_export()
    export.range(0, None, "grpo.t_gen")
    export.range(0, 500 * US, "grpo.t_reward", kind=60)
    export.launch(20 * US, 80 * US)
    summary = summary_of(export.done())
    assert summary.num_open_ranges == 1 and summary.num_other_ranges == 1
    assert [(p.name, p.wall_ns, p.num_kernels) for p in summary.phases] == [("t_gen", 80 * US, 1)]


def test_tails_of_names_are_cut(new_export: Callable[..., Any]) -> None:
    export = new_export()
    export.range(0, 100 * US, "aten::mm, op_id = 12")
    export.range(200 * US, 300 * US, "aten::mm, op_id = 13, seq = 4")
    export.launch(20 * US, 30 * US)
    export.launch(220 * US, 230 * US)
    assert [(r.name, r.num_kernels) for r in summary_of(export.done()).ranges] == [("aten::mm", 2)]


def test_busy_is_a_union_and_copies_count_as_activity(new_export: Callable[..., Any]) -> None:
    export = new_export()
    export.launch(10 * US, 30 * US)
    export.launch(20 * US, 40 * US, streamId=8)
    export.row("CUPTI_ACTIVITY_KIND_MEMCPY", start=30 * US, end=110 * US, deviceId=0, bytes=800, copyKind=1)
    summary = summary_of(export.done())
    device = summary.devices[0]
    assert (device.kernel_sum_ns, device.kernel_busy_ns, device.kernel_window_ns) == (40 * US, 30 * US, 30 * US)
    assert (device.activity_busy_ns, device.activity_window_ns) == (100 * US, 100 * US)
    assert summary.copies == {"host to device": (1, 800, 80 * US)}


def test_waves_of_a_launch(new_export: Callable[..., Any]) -> None:
    """96 blocks of 128 threads, 48 KiB each: 2 of them fit into the 100 KiB of one of 48 processors: exactly 1 wave."""
    export = new_export()
    export.facts()
    export.launch(10 * US, 30 * US)
    kernel = summary_of(export.done()).kernels[0]
    assert (kernel.waves, kernel.registers, kernel.shared_bytes, kernel.owner) == (1.0, 64, 49_152, "ours")


def test_what_is_missing_is_not_zero(new_export: Callable[..., Any]) -> None:
    """No kernel table, no ranges: nothing can be said, and no sentence calls the trace healthy."""
    export = new_export()
    export.facts()
    export.call(0, 5 * US, "cudaFree_v3020")
    summary = summary_of(export.done())
    assert summary.kernels is None and summary.num_kernels is None and summary.devices is None
    assert summary.phases is None and summary.unattributed is None and summary.num_steps is None
    assert {"CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"} <= set(summary.missing)


def test_an_empty_table_is_no_fault(new_export: Callable[..., Any]) -> None:
    """Converters write tables without rows; nsys itself does not."""
    export = new_export()
    export.range(0, 100 * US, "grpo.t_gen")
    export.launch(20 * US, 30 * US)
    for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"):
        export.connection.execute(f"DELETE FROM {table}")
        export.connection.commit()
        summary = summary_of(export.path)
        assert summary.num_kernels == 0 and summary.kernels == ()
    assert summary.phases is None and summary.unattributed.num_kernels == 0


def test_older_key_of_the_graph_mode_and_a_schema_to_come(new_export: Callable[..., Any]) -> None:
    export = new_export()
    export.facts(mode="Graph", key="PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE", schema="9.99.0")
    export.launch(10 * US, 20 * US)
    export.connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN ofTheFuture BLOB")
    export.connection.execute("CREATE TABLE TABLE_OF_THE_FUTURE(x)")
    summary = summary_of(export.done())
    assert summary.graph_mode == "graph" and summary.num_kernels == 1 and summary.versions["schema"] == "9.99.0"


def test_a_table_without_its_times_is_refused(new_export: Callable[..., Any]) -> None:
    export = new_export(without=("end",))
    export.launch(10 * US, 20 * US)
    with pytest.raises(TraceError, match=r"expected columns .*start, end.* without end: a schema that is not known"):
        read_nsys(export.done())


def test_an_empty_capture_is_an_error(new_export: Callable[..., Any]) -> None:
    export = new_export()
    export.facts()
    export.text("something")
    with pytest.raises(TraceError, match=r"the capture is empty: .*cudaProfilerStart"):
        read_nsys(export.done())


@pytest.mark.parametrize("frac", [0.001, 0.3, 0.9])
def test_a_truncated_file(stepped: tuple[str, Path], frac: float) -> None:
    path = stepped[1]
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * frac)])
    with pytest.raises(TraceError, match=r"cut short: expected .* bytes, got"):
        read_nsys(path)


def test_a_damaged_file(stepped: tuple[str, Path]) -> None:
    path = stepped[1]
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(TraceError, match="expected an intact SQLite export"):
        read_nsys(path)


def test_somebody_elses_database(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE users(name)")
    with pytest.raises(TraceError, match="expected tables of an nsys export"):
        read_nsys(path)


def test_text_where_a_number_belongs(new_export: Callable[..., Any]) -> None:
    export = new_export()
    export.launch(10 * US, 20 * US)
    export.connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'")
    with pytest.raises(TraceError, match="expected numbers in the tables"):
        read_nsys(export.done())


def test_the_export_is_left_as_it_was(stepped: tuple[str, Path]) -> None:
    before = stepped[1].read_bytes()
    stepped[1].chmod(0o444)
    summary_of(stepped[1])
    assert stepped[1].read_bytes() == before
    assert [path.name for path in stepped[1].parent.iterdir()] == [stepped[1].name]
