from __future__ import annotations

from pathlib import Path

from kvstore.tiers.memory_limit import MemoryLimit, memory_limit


def make(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_a_system_that_tells_nothing_sets_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None


def test_free_memory_is_the_limit_without_control_groups(tmp_path: Path) -> None:
    root = make(tmp_path, {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   50 kB\n"})
    assert MemoryLimit(50 * 1024, "free memory of this machine") == memory_limit(root)


def test_the_tightest_group_above_us_decides(tmp_path: Path) -> None:
    root = make(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 1000000 kB\n",
            "proc/self/cgroup": "0::/slice/pod\n",
            "sys/fs/cgroup/slice/pod/memory.max": "max\n",
            "sys/fs/cgroup/slice/memory.max": "10000\n",
            "sys/fs/cgroup/slice/memory.current": "4000\n",
            "sys/fs/cgroup/slice/memory.stat": "anon 3000\ninactive_file 1000\n",
        },
    )
    limit = memory_limit(root)
    assert limit is not None
    assert 7000 == limit.available_bytes
    assert "slice/memory.max" in limit.source


def test_the_limit_at_which_a_group_is_slowed_down_counts_too(tmp_path: Path) -> None:
    root = make(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod\n",
            "sys/fs/cgroup/pod/memory.max": "9000\n",
            "sys/fs/cgroup/pod/memory.high": "6000\n",
            "sys/fs/cgroup/pod/memory.current": "1000\n",
        },
    )
    limit = memory_limit(root)
    assert limit is not None
    assert 5000 == limit.available_bytes
    assert "memory.high" in limit.source


def test_the_group_of_a_container_is_found_at_the_mount(tmp_path: Path) -> None:
    root = make(tmp_path, {"proc/self/cgroup": "0::/not/here\n", "sys/fs/cgroup/memory.max": "5000\n"})
    limit = memory_limit(root)
    assert limit is not None
    assert 5000 == limit.available_bytes


def test_first_version_groups_count_too(tmp_path: Path) -> None:
    root = make(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "3000\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "9000\n",
        },
    )
    limit = memory_limit(root)
    assert limit is not None
    assert 0 == limit.available_bytes


def test_this_machine_has_a_limit() -> None:
    limit = memory_limit()
    assert limit is not None
    assert limit.available_bytes > 0
