"""(being written)"""

from titan_tools.infer.task import Task, Work


def prepare_chat(work: Work) -> Task:
    raise NotImplementedError
