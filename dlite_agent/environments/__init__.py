"""Environments of agent benchmarks, run live: their own code behind LangChain tools, and their check of the end state.

    for task in read_live_tasks(Path("workloads")):
        environment = open_environment(task)
        agent = create_agent(model, environment_tools(environment, task.session.tools))
        ...
        print(environment.end_state())

The benchmarks are packages of their own, which a `MissingDependencyError` tells how to install.
"""

from dlite_agent.environments.live import (
    EndState,
    Environment,
    LiveTask,
    environment_tools,
    open_environment,
    read_live_tasks,
)

__all__ = ["EndState", "Environment", "LiveTask", "environment_tools", "open_environment", "read_live_tasks"]
