"""Several processes train what one would: the same batches, the same losses, the same weights."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from several import Done, launch, settings, train, train_words
from tiny import TINY, resolve_tiny, run, tiny
from torch import nn
from torch._C._distributed_c10d import HashStore

from training_lab import distributed
from training_lab.checkpoint import list_checkpoints
from training_lab.data.batches import IGNORED, make_batch, without_labels
from training_lab.data.dataset import prepare_dataset
from training_lab.distributed import Processes, read_environment
from training_lab.errors import UserError
from training_lab.footprint import share_out
from training_lab.kernels import choose_kernels
from training_lab.parallel import in_turn, own_share
from training_lab.precision import choose_hardware, own_device
from training_lab.record import RunFolder
from training_lab.restored import restore_model
from training_lab.schedule import learning_rate
from training_lab.tracking import read_metrics, rows_of_kind

FIFTY = ("train.updates=50", "eval.every=0", "checkpoint.every=50")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The tiny config on one process: what all are compared with."""
    with contextlib.chdir(tmp_path_factory.mktemp("alone")):
        done = train(0)
        yield {"rows": done.rows(), "evaluations": done.rows("evaluation"), "weights": done.weights}


def seen(rows: list[dict[str, Any]]) -> list[list[Any]]:
    return [[row[key] for key in ("loss", "grad_norm", "lr", "target_tokens", "batch_sha256")] for row in rows]


def test_two_processes_are_one_with_its_micro_batches_accumulated_bit_for_bit(alone: dict[str, Any]) -> None:
    two = train(2)
    assert seen(two.rows()) == seen(alone["rows"])
    assert [row["val_loss"] for row in two.rows("evaluation")] == [row["val_loss"] for row in alone["evaluations"]]
    assert two.weights == alone["weights"]
    replayed = run("verify", two.folder.name, "--replay", "3", "--from", "0")
    assert "replayed update 3: loss" in replayed.stdout
    assert "BAD  replayed" not in replayed.stdout
    (process,) = two.read("environment.json")["processes"]
    assert (process["world_size"], process["parallel"], process["micro_batches"]) == (2, "ddp", 2)
    begun = json.loads(two.out.splitlines()[0])
    assert "torchrun --nproc-per-node=2 --standalone -m training_lab train" in json.dumps(begun)


def test_four_processes_with_unequal_and_empty_shares_stay_within_a_millionth() -> None:
    """Documents are never cut: an update of 96 tokens has one to a few pieces, so that some processes have none."""
    uneven = ("batch.tokens=96", "train.seed=3", "batch.micro_batches=1", "optimizer.max_lr=1e-3", *FIFTY)
    one = train(0, *uneven)
    losses, batches = one.losses, [row["batch_sha256"] for row in one.rows()]
    four = train(4, *uneven)
    assert [row["batch_sha256"] for row in four.rows()] == batches
    assert four.losses == pytest.approx(losses, rel=1e-6)
    dataset = prepare_dataset(share_out(tiny("model.dropout=0", *uneven), 4))
    counts = [len(dataset.update_data(update).micro_batches) for update in range(1, 51)]
    assert min(counts) < 4, "some update leaves a process without a share"


def test_sharded_weights_train_the_same_and_their_states_load_everywhere(alone: dict[str, Any]) -> None:
    losses = [row["loss"] for row in alone["rows"]]
    sharded = train(2, "train.parallel=fsdp", options=("--new", "--stop-after", "5"))
    assert sharded.losses == pytest.approx(losses[:5], rel=1e-5)
    (newest, *_) = list_checkpoints(sharded.folder / "checkpoints")
    assert {"state.pt", "parts/.metadata", "parts/__0_0.distcp", "parts/__1_0.distcp"} == {*newest.verify()["files"]}
    kept = newest.load()
    assert {*kept["model"]} == {name for name, _ in model_of(sharded).named_parameters()}
    train(0, options=("--stop-after", "8"))
    train(2, "train.parallel=fsdp", options=("--stop-after", "10"))
    done = train(4, options=())
    assert done.losses == pytest.approx(losses, rel=1e-5)
    assert [row["batch_sha256"] for row in done.rows()] == [row["batch_sha256"] for row in alone["rows"]]
    assert done.rows("evaluation")[-1]["val_loss"] == pytest.approx(alone["evaluations"][-1]["val_loss"], rel=1e-5)
    assert len(list(Path(".runs").iterdir())) == 1


def model_of(done: Done) -> nn.Module:
    return restore_model(RunFolder(done.folder), None).model


def test_muon_steps_the_same_where_each_process_has_a_part_of_its_matrices() -> None:
    one = train(0, "optimizer.name=muon").losses
    assert train(2, "optimizer.name=muon", "train.parallel=fsdp").losses == pytest.approx(one, rel=1e-3)


def test_dropout_is_the_same_for_any_number_of_processes() -> None:
    dropping = ("model.dropout=0.2", "train.updates=4", "eval.every=0", "checkpoint.every=4")
    one = train(0, *dropping).weights
    assert train(2, *dropping).weights == one
    assert train(0, *dropping, "model.dropout=0.1").weights != one


def train_with(code: str, tmp_path: Path, *overrides: str) -> Done:
    """Two processes that run some code of a test first, with `rank` the number of the process."""
    body = "\n".join(f"    {line}" for line in textwrap.dedent(code).strip().splitlines())
    start = "import os\nif 'RANK' in os.environ:\n    rank = int(os.environ['RANK'])\n"
    (tmp_path / "sitecustomize.py").write_text(f"{start}{body}\n")
    path = os.pathsep.join([str(tmp_path), str(TINY.parent.parent)])
    words = ["--config", str(TINY), "--new", "--json", *settings(("model.dropout=0", *overrides))]
    process = launch(2, *words, env={"PYTHONPATH": path})
    out, err = process.communicate(timeout=600)
    return Done(process.returncode, out, err)


def test_gradients_are_added_up_once_an_update(tmp_path: Path) -> None:
    """Counted in the processes themselves: each bucket of the gradient crosses once, whatever the micro-batches."""
    counting = """
        import atexit
        import training_lab.parallel as parallel
        real, counted = parallel.add_up, []
        def add_up(bucket):
            counted.append(bucket.is_last())
            return real(bucket)
        parallel.add_up = add_up
        atexit.register(lambda: open(f'counted-{rank}', 'w').write(str(sum(counted))))
    """
    done = train_with(counting, tmp_path, "batch.micro_batches=8")
    assert done.returncode == 0, done.err
    assert [Path(f"counted-{rank}").read_text() for rank in (0, 1)] == ["12", "12"]


def start_long(*overrides: str, processes: int = 2) -> tuple[Any, list[int]]:
    """A training that is at work, and the ids of its processes by rank."""
    words = ["--config", str(TINY), "--json", *settings(("model.dropout=0", "train.updates=100000", *overrides))]
    process = launch(processes, *words)
    assert process.stdout is not None
    while True:
        row = json.loads(process.stdout.readline())
        if row.get("kind") == "update" and row["update"] >= 5:
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    by_rank = {}
    for child in map(int, children):
        texts = Path(f"/proc/{child}/environ").read_text().split("\0")
        variables = dict(one.split("=", 1) for one in texts if "=" in one)
        if "RANK" in variables:
            by_rank[int(variables["RANK"])] = child
    return process, [by_rank[rank] for rank in range(processes)]


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_a_killed_process_ends_all_and_the_run_goes_on_from_a_whole_state(victims: tuple[int, ...]) -> None:
    process, ranks = start_long("checkpoint.every=2", "eval.every=0")
    killed = time.monotonic()
    for rank in victims:
        os.kill(ranks[rank], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert process.returncode == 1
    done = Done(1, out, err)
    last = max(row["update"] for row in done.rows())
    kept = [one.update for one in list_checkpoints(done.folder / "checkpoints") if one.verify()]
    assert kept
    assert last - kept[0] <= 6, "two intervals, and what was being saved"
    if victims == (1,):
        message = done.read("summary.json")["failure"]["message"]
        assert message.startswith("another process of the run is gone: it was killed, or its machine is lost")
    words = ["--config", str(TINY), "--json", *settings(("model.dropout=0", "train.updates=100000"))]
    words += settings(("checkpoint.every=2", "eval.every=0"))
    again = train_words(2, [*words, "--stop-after", str(last + 2)])
    updates = [row["update"] for row in rows_that_count(again)]
    assert updates == list(range(1, last + 3))


def rows_that_count(done: Done) -> list[dict[str, Any]]:
    return rows_of_kind(read_metrics(done.folder / "metrics.jsonl"), "update")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_saves_in_step_and_the_same_command_goes_on(number: int) -> None:
    process, _ = start_long("checkpoint.every=50000", "eval.every=0")
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    done = Done(process.returncode, out, err)
    summary = done.read("summary.json")
    assert (process.returncode != 0, summary["state"]) == (True, "interrupted"), err
    assert [one.update for one in list_checkpoints(done.folder / "checkpoints")] == [summary["updates"]]
    assert summary["updates"] == done.rows()[-1]["update"]


def test_a_failure_in_one_process_is_the_cause_that_the_record_names(tmp_path: Path) -> None:
    failing = """
        import training_lab.engine as engine
        real = engine.train_update
        def train_update(trainer, read=None):
            if rank == 1 and trainer.progress.update == 3:
                raise ValueError('the disk of this one is on fire')
            return real(trainer, read)
        engine.train_update = train_update
    """
    done = train_with(failing, tmp_path)
    assert done.returncode == 1
    message = done.read("summary.json")["failure"]["message"]
    assert message == "ended because another process failed: process 1: ValueError: the disk of this one is on fire"
    assert "process 1: ValueError: the disk of this one is on fire" in done.err


def test_a_loss_that_is_not_a_number_stops_all_and_names_the_micro_batch_of_whoever_had_it(tmp_path: Path) -> None:
    spoiling = """
        import training_lab.engine as engine
        real = engine.forward_backward
        def forward_backward(trainer, *rest):
            loss = real(trainer, *rest)
            return loss * float('nan') if rank == 1 and trainer.progress.update == 2 else loss
        engine.forward_backward = forward_backward
    """
    done = train_with(spoiling, tmp_path)
    summary = done.read("summary.json")
    assert (done.returncode, summary["state"], summary["updates"]) == (1, "failed: non-finite", 2)
    assert (summary["failure"]["micro_batch"], summary["failure"]["num_micro_batches"]) == (2, 2)


FULL = """
    import errno, os
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    real, calls = FileSystemWriter.write_data, []
    def write_data(self, *arguments):
        calls.append(1)
        if rank == {rank} and len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, *arguments)
    FileSystemWriter.write_data = write_data
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_under_one_process_ends_all_and_leaves_the_state_before(rank: int, tmp_path: Path) -> None:
    done = train_with(FULL.format(rank=rank), tmp_path, "train.parallel=fsdp", "checkpoint.keep_best=false")
    assert done.returncode == 1
    message = done.read("summary.json")["failure"]["message"]
    assert "update-000006: cannot be saved: " in message
    assert f"process {rank}: OSError: [Errno 28] No space left on device; the checkpoints before it are" in message
    checkpoints = done.folder / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["update-000003"]
    assert list_checkpoints(checkpoints)[0].verify()
    assert not (done.folder / "checkpoint.pt").exists(), "a state in parts is no one file"


def test_the_command_of_the_seed_documents_works_as_written() -> None:
    """`torchrun --nproc_per_node=4 --nnodes=2 base_train.py`, with two machines played by two agents on this one."""
    training = TINY.parent.parent
    shutil.copy(training / "base_train.py", "base_train.py")
    Path("config.yaml").write_text(f"extends: {TINY}\nmodel: {{dropout: 0}}\ntrain: {{updates: 3}}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(training), "OMP_NUM_THREADS": "1"}
    where = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4", "--nnodes=2", f"--node-rank={rank}",
             *where, "base_train.py"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=environment,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    ends = [agent.communicate(timeout=600) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], ends
    done = Done(0, *ends[0])
    (process,) = done.read("environment.json")["processes"]
    assert (process["world_size"], process["machines"], process["micro_batches"]) == (8, 2, 8)
    assert len(done.rows()) == 3


TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, "RANK: must be a number that torchrun sets, got 'x'"),
        ({"RANK": "4"}, "RANK 4, WORLD_SIZE 4, LOCAL_RANK 1, LOCAL_WORLD_SIZE 2: do not fit together"),
        ({"LOCAL_RANK": "2"}, "do not fit together; start the processes with torchrun"),
        ({"WORLD_SIZE": "1"}, "do not fit together"),
        ({"MASTER_PORT": ""}, "but not MASTER_PORT: start the processes with torchrun, or unset all of them"),
        ({"LOCAL_RANK": None}, "but not LOCAL_RANK"),
        ({"RANK": None}, "but not RANK"),
    ],
)  # fmt: skip
def test_an_environment_that_contradicts_itself_is_refused(change: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(UserError) as raised:
        read_environment(environment)
    assert message in str(raised.value)


def test_without_torchrun_there_is_one_process() -> None:
    assert read_environment({"MASTER_ADDR": "left over"}) is None
    assert read_environment(TORCHRUN) == (1, 1, 4, 2)


def test_a_wrong_world_ends_with_2_and_one_line() -> None:
    command = [sys.executable, "-m", "training_lab", "train", "--config", str(TINY)]
    environment = {**os.environ, "PYTHONPATH": str(TINY.parent.parent), "WORLD_SIZE": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: WORLD_SIZE is set, but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: ")
    assert len(done.stderr.splitlines()) == 1
    assert not Path(".runs").exists()


def test_more_processes_than_rows_are_refused_with_the_numbers() -> None:
    config = tiny("batch.layout=packs", "batch.packs=3")
    with pytest.raises(
        UserError, match=r"batch\.packs: an update of 3 packs cannot occupy 4 processes; start at most 3"
    ):
        share_out(config, 4)
    assert share_out(config, 3).batch.micro_batches == 3


@pytest.mark.parametrize(("micro_batches", "world_size", "shared"), [(1, 1, 1), (1, 2, 2), (3, 2, 4), (8, 4, 8)])
def test_each_process_gets_equally_many_micro_batches(micro_batches: int, world_size: int, shared: int) -> None:
    config = tiny(f"batch.micro_batches={micro_batches}")
    assert share_out(config, world_size).batch.micro_batches == shared
    assert share_out(config, world_size).batch.update_tokens == config.batch.update_tokens


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_shares_are_disjoint_whole_and_found_again_in_order(world_size: int) -> None:
    dataset = prepare_dataset(tiny("batch.micro_batches=5"))
    batches = dataset.update_data(1).micro_batches
    shares = [own_share(batches, Processes(rank, rank, world_size, world_size)) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert sum(batch.num_target_tokens for share in shares for batch in share) == sum(
        b.num_target_tokens for b in batches
    )
    extra = [batch for share in shares for batch in share if batch.num_target_tokens == 0]
    assert all(bool((batch.labels_T == IGNORED).all()) for batch in extra)
    numbered = [[float(batch.tokens_T.data_ptr()) for batch in share] for share in shares]
    assert in_turn(numbered, len(batches)) == [float(batch.tokens_T.data_ptr()) for batch in batches]


def test_a_machine_with_too_few_gpus_is_named_with_the_number_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        UserError, match="4 processes on a machine with 2 CUDA devices: give torchrun --nproc-per-node=2"
    ):
        own_device(torch.device("cuda"), Processes(3, 3, 4, 4))
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert own_device(torch.device("cuda"), Processes(3, 1, 4, 2)) == torch.device("cuda", 1) == chosen[0]
    assert own_device(torch.device("cpu"), Processes(3, 3, 4, 4)) == torch.device("cpu")


def test_processes_with_other_data_do_not_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = HashStore()
    store.set("data/1", "other")
    with pytest.raises(
        UserError, match="different data: process 0 has mine, process 1 other; each machine needs the same"
    ):
        Processes(0, 0, 2, 2, store).need_same("data", "mine")


def test_only_the_first_word_of_a_failure_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "LAST_WORDS_S", 0.2)
    store: Any = HashStore()
    first, second, third = (Processes(rank, rank, 3, 3, store) for rank in range(3))
    assert first.failure_elsewhere() is None
    second.tell_failure("it began here")
    third.tell_failure("Connection closed by peer")
    assert first.failure_elsewhere() == third.failure_elsewhere() == "process 1: it began here"
    assert second.failure_elsewhere() is None


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_the_learning_rate_follows_the_size_of_the_batch_by_the_chosen_rule(rule: str, factor: float) -> None:
    base = tiny("batch.tokens=128")
    overrides = ["batch.tokens=512", f"optimizer.lr_scaling={rule}"]
    overrides += ["optimizer.lr_base_tokens=128"] if rule != "none" else []
    scaled = tiny(*overrides)
    for update in (1, 2, 5, 12):
        assert learning_rate(scaled, update) == pytest.approx(factor * learning_rate(base, update), rel=1e-12)


def test_a_rule_without_its_base_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer\.lr_base_tokens: is needed by optimizer\.lr_scaling"):
        tiny("optimizer.lr_scaling=linear")


def test_how_a_run_is_shared_is_no_part_of_its_identity() -> None:
    assert resolve_tiny("train.parallel=fsdp").identity == resolve_tiny().identity


def test_a_batch_without_labels_has_the_shape_and_no_gradient() -> None:
    dataset = prepare_dataset(tiny())
    batch = make_batch(dataset.train, dataset.layout.pieces_of_update(1))
    empty = without_labels(batch)
    assert empty.tokens_T is batch.tokens_T
    assert (empty.num_target_tokens, int((empty.labels_T != IGNORED).sum())) == (0, 0)
    assert choose_kernels(tiny(), choose_hardware(tiny())).loss == "chunked"


def test_a_sharded_model_is_not_compiled() -> None:
    config = tiny("train.parallel=fsdp", "kernels.compile=on", "batch.layout=packs")
    with pytest.raises(UserError, match=r"kernels\.compile: on is not possible here: train\.parallel=fsdp gathers"):
        choose_kernels(config, choose_hardware(config))
