"""What all tests share."""

import os

import hypothesis
import pytest

# Examples are judged by what they show, not by how long a busy machine takes for them.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of processes that share a run, give each file's tests to one; those that take long first.

    Real replicas are one process's, and so is whatever imports vLLM or uses the machine's huge
    pages or shared memory, which are counted: marked ``vllm`` or ``xdist_group("vllm")``.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    slow = {each.path for each in items if each.get_closest_marker("slow")}
    for each in items:
        if each.get_closest_marker("vllm"):
            each.add_marker(pytest.mark.xdist_group("vllm"))
        elif not each.get_closest_marker("xdist_group"):
            each.add_marker(pytest.mark.xdist_group(each.path.stem))
    items.sort(key=lambda each: (not each.get_closest_marker("vllm"), each.path not in slow))
