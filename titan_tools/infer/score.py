"""(being written)"""

from titan_tools.infer.task import Task, Work


def prepare_score(work: Work) -> Task:
    raise NotImplementedError
