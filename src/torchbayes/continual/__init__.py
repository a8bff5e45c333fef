"""Continual learning: tasks one after the other, each posterior the next task's prior."""

from torchbayes.continual.learn import (
    SETTINGS,
    TaskScores,
    can_remember,
    learn_tasks,
    markdown_table,
)
from torchbayes.continual.tasks import Task, permuted_tasks, split_tasks

__all__ = [
    "SETTINGS",
    "Task",
    "TaskScores",
    "can_remember",
    "learn_tasks",
    "markdown_table",
    "permuted_tasks",
    "split_tasks",
]
