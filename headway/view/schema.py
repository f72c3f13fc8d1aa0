"""The tables of the index, and by what groups can be sorted."""

SORTS = {
    "step": "step",
    "reward": "ifnull(reward, -1e308)",
    "length": "ifnull(length, -1)",
    "staleness": "ifnull(staleness, -1)",
}
"""What groups are sorted by, and the expression; each has an index. What is not known comes before all that is."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    name TEXT PRIMARY KEY, known_bytes INTEGER NOT NULL, stamp TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, step INTEGER NOT NULL, task_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    outcome TEXT NOT NULL, prompt TEXT NOT NULL,
    num_samples INTEGER, reward REAL, reward_min REAL, reward_max REAL, length REAL, length_max INTEGER,
    version_min INTEGER, version_max INTEGER, consumed_step INTEGER, staleness INTEGER);
CREATE TABLE IF NOT EXISTS samples (
    group_id INTEGER NOT NULL, sample INTEGER NOT NULL, reward REAL, length INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    version_min INTEGER, version_max INTEGER, stop_reason TEXT NOT NULL,
    offset INTEGER NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (group_id, sample)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trained (
    task_id TEXT NOT NULL, sample INTEGER NOT NULL, step INTEGER NOT NULL,
    offset INTEGER NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (task_id, sample, step)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS groups_of_task ON groups (task_id, id);
CREATE INDEX IF NOT EXISTS trained_of_step ON trained (step, task_id);
""" + "".join(f"CREATE INDEX IF NOT EXISTS groups_by_{name} ON groups ({how}, id);\n" for name, how in SORTS.items())
