"""Files of records: round trips through parquet, files of older versions, and damaged files."""

import hashlib
import json
import random
import tracemalloc
from dataclasses import asdict, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.records.files import (
    TASK_SCHEMA,
    RecordError,
    read_scores,
    read_tasks,
    read_trajectories,
    tasks_digest,
    write_tasks,
    write_trajectories,
)
from rollout.records.trajectory import (
    Message,
    Status,
    Task,
    ToolEvent,
    ToolUse,
    Trajectory,
    Turn,
    VersionSpan,
)
from tests.support.played import trajectory, turn

TASKS = [
    Task(id="a:1+2", prompt="What is 1+2?", answers=("3",), env="math", source="a", split="train"),
    Task(id="b:é", prompt="two\nlines", answers=("x", "y"), env="search", source="b", split="test"),
]
TURN = Turn(
    index=0,
    agent="solver",
    policy="p",
    policy_version=3,
    versions=(VersionSpan(version=2, start=0, end=1), VersionSpan(version=3, start=1, end=2)),
    node="0.1",
    state_key="ab",
    messages=(Message(role="system", content="s"), Message(role="user", content="u")),
    prompt_ids=(5, 6, 7),
    completion_ids=(8, 2),
    logprobs=(-0.5, -0.25),
    temperature=1.0,
    text="\\boxed{3}",
    finish_reason="stop",
    valid=True,
    seed=2**64 - 1,
    reward=0.9,
    started_s=1.5,
    took_s=0.5,
    routing=bytes([0, 34, 92, 255] * 2),  # two experts of one layer for each of four tokens
)
CHATTED = replace(
    TURN,
    index=2,
    chat="solver/0",
    messages=(
        *TURN.messages,
        Message(
            role="assistant",
            content="I ask.",
            reasoning="hm",
            calls=(ToolUse(id="0", name="f", arguments='{"a": 1}'),),
            raw='<think>hm</think>I ask.{"name":"f","arguments":{"a":1}}',
        ),
        Message(role="tool", content="2", answers="0"),
    ),
)
TRAJECTORIES = [
    Trajectory(
        id="4/a:1+2/0",
        task_id="a:1+2",
        source="a",
        sample=0,
        step=4,
        turns=(TURN, replace(TURN, index=1, reward=None, masked=True), CHATTED),
        tools=(
            ToolEvent(
                after_turn=0,
                tool="search",
                query="q",
                result="r",
                failed=True,
                started_s=5.5,
                took_s=0.25,
            ),
        ),
        outcome=1.0,
        answer="3",
        metrics={"answered": 1.0},
    ),
    Trajectory(
        id="4/a:1+2/1",
        task_id="a:1+2",
        source="a",
        sample=1,
        step=4,
        turns=(),
        status=Status.FAILED,
        error="EngineError",
    ),
]


def test_tasks_round_trip(tmp_path):
    write_tasks(tmp_path / "deep" / "tasks.parquet", TASKS)
    assert read_tasks(tmp_path / "deep" / "tasks.parquet") == TASKS


def test_trajectories_round_trip_with_every_id_and_token(tmp_path):
    path = tmp_path / "t.parquet"
    write_trajectories(path, TRAJECTORIES)
    assert read_trajectories(path) == TRAJECTORIES
    read = read_trajectories(path)
    assert read[1].status is Status.FAILED
    # times do not count in the comparison of trajectories
    assert [(turn.started_s, turn.took_s) for turn in read[0].turns] == [(1.5, 0.5)] * 3
    assert [(event.started_s, event.took_s) for event in read[0].tools] == [(5.5, 0.25)]


def test_new_messages_of_a_chat_are_those_after_its_latest_reply():
    assert CHATTED.new_messages == (Message(role="tool", content="2", answers="0"),)
    assert TURN.new_messages == TURN.messages
    assert [message.text for message in CHATTED.messages[1:3]] == ["u", CHATTED.messages[2].raw]


def test_files_with_fewer_fields_of_turns_and_tools_are_read(tmp_path):
    path = tmp_path / "t.parquet"
    write_trajectories(path, TRAJECTORIES)
    table = pq.read_table(path)
    rows = table.to_pylist()
    later_fields = {"versions", "started_s", "took_s", "failed", "chat"}
    for row in rows:
        for column in ("turns", "tools"):
            row[column] = [
                {name: value for name, value in item.items() if name not in later_fields}
                for item in row[column]
            ]
    fields = []
    for column in table.schema:
        column_type = column.type
        if column.name in ("turns", "tools"):
            column_type = pa.list_(
                pa.struct(
                    [field for field in column_type.value_type if field.name not in later_fields]
                )
            )
        fields.append((column.name, column_type))
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), path)
    turns = tuple(replace(turn, versions=(), chat="") for turn in TRAJECTORIES[0].turns)
    tools = tuple(replace(tool, failed=False) for tool in TRAJECTORIES[0].tools)
    assert read_trajectories(path) == [
        replace(TRAJECTORIES[0], turns=turns, tools=tools),
        TRAJECTORIES[1],
    ]
    assert turns[0].oldest_version == 3


def test_messages_without_the_fields_of_chats_are_read(tmp_path):
    path = tmp_path / "t.parquet"
    plain = [replace(TRAJECTORIES[0], turns=TRAJECTORIES[0].turns[:2]), TRAJECTORIES[1]]
    write_trajectories(path, plain)
    table = pq.read_table(path)
    turns = table.schema.field("turns").type.value_type
    old_messages = pa.list_(
        pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())])
    )
    old_turns = pa.struct(
        [pa.field(f.name, old_messages) if f.name == "messages" else f for f in turns]
    )
    fields = [
        pa.field(f.name, pa.list_(old_turns)) if f.name == "turns" else f for f in table.schema
    ]
    rows = table.to_pylist()
    for row in rows:
        for turn_row in row["turns"]:
            turn_row["messages"] = [
                {"role": message["role"], "content": message["content"]}
                for message in turn_row["messages"]
            ]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), path)
    assert "reasoning" not in str(pq.read_schema(path))
    assert read_trajectories(path) == plain


def test_writing_leaves_no_temporary_file(tmp_path):
    write_tasks(tmp_path / "tasks.parquet", TASKS)
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.parquet"]


def test_empty_lists_round_trip(tmp_path):
    write_tasks(tmp_path / "none.parquet", [])
    write_trajectories(tmp_path / "never.parquet", [])
    assert read_tasks(tmp_path / "none.parquet") == []
    assert read_trajectories(tmp_path / "never.parquet") == []


def test_missing_file_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"gone\.parquet: no such file"):
        read_tasks(tmp_path / "gone.parquet")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_corrupt_file_is_named_in_one_line(tmp_path, keep):
    path = tmp_path / "broken.parquet"
    write_trajectories(path, TRAJECTORIES)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        RecordError, match=r"broken\.parquet: not a readable parquet file"
    ) as caught:
        read_trajectories(path)
    assert "\n" not in str(caught.value)


def test_damaged_middle_is_refused(tmp_path):
    path = tmp_path / "damaged.parquet"
    write_tasks(path, TASKS * 1000)
    data = bytearray(path.read_bytes())
    data[8 : len(data) // 2] = b"\xff" * (len(data) // 2 - 8)
    path.write_bytes(data)
    with pytest.raises(RecordError, match=r"damaged\.parquet"):
        read_tasks(path)


def test_missing_column_is_named(tmp_path):
    path = tmp_path / "narrow.parquet"
    pq.write_table(pa.table({"id": ["a"], "prompt": ["?"]}), path)
    with pytest.raises(RecordError, match="no column answers, env, source, split"):
        read_tasks(path)


def test_column_of_another_type_is_refused(tmp_path):
    path = tmp_path / "typed.parquet"
    columns = {
        "id": ["a"],
        "prompt": ["?"],
        "answers": ["3"],
        "env": ["math"],
        "source": ["a"],
        "split": ["train"],
    }
    pq.write_table(pa.table(columns), path)
    with pytest.raises(RecordError, match=r"typed\.parquet"):
        read_tasks(path)


def test_tasks_that_have_changed_since_they_were_written_are_refused(tmp_path):
    path = tmp_path / "tasks.parquet"
    tasks = [
        replace(TASKS[0], id=f"a:{n}", prompt=f"{n} + 1?", answers=(str(n + 1),)) for n in range(40)
    ]
    write_tasks(path, tasks)
    content = path.read_bytes()
    generator = random.Random(0)
    refused = 0
    for _ in range(200):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        try:
            assert read_tasks(path) == tasks  # a bit without a meaning
        except RecordError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompt": None}, "no prompt"),
        ({"answers": None}, "no answers"),
        ({"answers": [None]}, "no answers"),
        ({"id": ""}, "id ''; expected a name"),
        ({"id": "../../x"}, "id '../../x'; expected a name"),
        ({"id": "/etc/x"}, "id '/etc/x'; expected a name that does not begin with `/` or `~`"),
        ({"id": "~/x"}, "id '~/x'; expected a name that does not begin with `/` or `~`"),
        ({"id": "a/./x"}, "without the parts `.` and `..`"),
        ({"id": "a\nb"}, "expected a name"),
    ],
)
def test_an_invalid_task_is_refused_in_one_line(tmp_path, change, problem):
    path = tmp_path / "tasks.parquet"
    rows = [asdict(task) for task in TASKS]
    pq.write_table(pa.Table.from_pylist([*rows, rows[0] | change], schema=TASK_SCHEMA), path)
    with pytest.raises(RecordError) as error:
        read_tasks(path)
    assert str(error.value).startswith(f"{path}: row {len(rows) + 1}: ") and problem in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_a_trajectory_without_a_required_field_is_refused_in_one_line(tmp_path):
    write_trajectories(tmp_path / "played.parquet", [trajectory(turn(0))])
    table = pq.read_table(tmp_path / "played.parquet")
    turns = [
        [{**turn_row, "policy_version": None} for turn_row in row]
        for row in table["turns"].to_pylist()
    ]
    column_index = table.schema.get_field_index("turns")
    damaged = table.set_column(
        column_index, table.schema.field("turns"), pa.array(turns, table.schema.field("turns").type)
    )
    pq.write_table(damaged, tmp_path / "played.parquet")
    with pytest.raises(
        RecordError,
        match=r"turns\.0\.policy_version: Field required; the file is damaged, make it again$",
    ):
        read_trajectories(tmp_path / "played.parquet")


def test_columns_are_not_dictionary_encoded(tmp_path):
    path = tmp_path / "t.parquet"
    write_trajectories(path, [trajectory(TURN)] * 40)
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    for column in columns:
        assert not any("DICTIONARY" in encoding for encoding in column.encodings)
    assert len(read_trajectories(path)) == 40


def test_scores_are_read_without_texts_and_tokens(tmp_path):
    path = tmp_path / "t.parquet"
    written = [
        trajectory(TURN, CHATTED),
        trajectory(sample=1, outcome=None, status=Status.FAILED, error="EnvError: no"),
    ]
    write_trajectories(path, written)
    played, failed = read_scores(path)
    assert len(played.turns) == 2
    for turn_read, turn_written in zip(played.turns, (TURN, CHATTED), strict=True):
        for name in ("agent", "valid", "scores", "reward", "masked", "seed"):
            assert getattr(turn_read, name) == getattr(turn_written, name)
        for name in ("prompt_ids", "completion_ids", "messages"):
            assert getattr(turn_read, name) == ()
    assert played.score == written[0].score
    assert played.answer == written[0].answer
    assert failed.score is None
    assert failed.failure_reason == "EnvError"


def test_the_digest_of_tasks_is_that_of_their_list_and_takes_little_memory():
    tasks = [
        replace(TASKS[0], id=str(number), answers=("1 2 3\n" * 100_000,)) for number in range(20)
    ]
    list_digest = hashlib.sha256(json.dumps([asdict(task) for task in tasks]).encode()).hexdigest()
    tracemalloc.start()
    try:
        assert tasks_digest(tasks) == list_digest
        assert tracemalloc.get_traced_memory()[1] < 5_000_000  # of 12 MB of tests
    finally:
        tracemalloc.stop()
    assert tasks_digest([]) == hashlib.sha256(b"[]").hexdigest()
