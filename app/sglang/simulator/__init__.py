"""A simulated SGLang server: real HTTP, real batching, no model.

It exists so that tests, `headrace demo` and benchmarks meet SGLang's arithmetic (a KV pool that fills, admission,
retraction), its wire bodies and its ways of failing, on a laptop. Invariant: a client that is right against this
server is right against SGLang 0.5.23; what is simplified is said in the docstring of the room that simplifies it.
Production code never imports this package.
"""

from app.sglang.simulator.config import SimulatorConfig
from app.sglang.simulator.faults import Faults
from app.sglang.simulator.running import RunningSimulator, running_simulator, serve
from app.sglang.simulator.server import Simulator
from app.sglang.simulator.tokens import prompt_hash

__all__ = ["Faults", "RunningSimulator", "Simulator", "SimulatorConfig", "prompt_hash", "running_simulator", "serve"]
