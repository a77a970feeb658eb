"""An engine's process dies two steps after it was given a job of 77 tokens."""

import os
import signal
import sys

POISON_TOKENS, STEPS = 77, 2

if any("engine_process" in word for word in sys.orig_argv):
    from penstock.worker.engine.engine import Engine
    from penstock.worker.engine.io.messages import AddSequence, Output

    add, step = Engine._add, Engine.step
    steps = list[int]()

    def add_poison(self: Engine, addition: AddSequence) -> None:
        if addition.params.max_tokens == POISON_TOKENS:
            steps.append(STEPS)
        add(self, addition)

    def step_towards_death(self: Engine) -> list[Output]:
        if steps:
            steps[0] -= 1
            if not steps[0]:
                os.kill(os.getpid(), signal.SIGKILL)
        return step(self)

    Engine._add, Engine.step = add_poison, step_towards_death  # type: ignore[method-assign]
