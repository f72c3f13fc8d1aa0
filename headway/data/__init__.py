"""The rows that are trained and evaluated on: sources, the prompt-length filter, a seeded order, a cursor.

dataset = open_dataset(config.train_dataset, tokenizer, config.seed)
log.info("%s", dataset.report())
for task in dataset.tasks(Cursor(*saved)):         # without end, epoch after epoch
    submit(task.task_id, task.data_json)           # "epoch/row"
    saved = task.after                             # what a checkpoint stores
"""

from headway.data.dataset import Cursor, Dataset, LeftOut, Task, open_dataset
from headway.data.rows import Row

__all__ = ["Cursor", "Dataset", "LeftOut", "Row", "Task", "open_dataset"]
