"""Conversion of unexpected exceptions in orchestras, environments and tools to `Defect`."""

from dataclasses import dataclass

from rollout.base.deadlines import Late
from rollout.base.error_location import describe_with_location
from rollout.base.errors import Defect, EngineError, EnvError, Unusable


@dataclass(slots=True)
class DefectGuard:
    """Context manager that turns an unexpected exception into a Defect, which fails one trajectory.

    EngineError, EnvError, Late and Unusable are expected and pass unchanged. SystemExit is converted
    too, because with it asyncio would end the event loop of all trajectories.
    """

    # This is a class because @contextmanager is several times slower, and a turn enters a guard about
    # three times.

    code: str  # name of the guarded code in the error, such as "adder.step"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (Exception, SystemExit)):
            return
        if isinstance(error, (EngineError, EnvError, Late, Unusable)):
            return
        raise Defect(f"{self.code}: {describe_with_location(error)}") from error
