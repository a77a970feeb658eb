"""Hot reload: reads the settings of a process again while it runs, on SIGHUP."""

import logging
from collections.abc import Callable

from penstock.schemas.process.secret import BadSecret
from penstock.schemas.process.start import S, WrongSettings, write_log_to_stderr

log = logging.getLogger(__name__)


def reload(
    old: S,
    read: Callable[[], S],
    reloadable: frozenset[str],
    apply: Callable[[S], None],
    process: str,
) -> None:
    """Read the settings as at the start, and put those that are `reloadable` in force.

    Where one is wrong all stay as they were, and the log says why; `apply` may raise BadSecret for
    it. Settings are logged by their names alone, since values may be secret.
    """
    try:
        settings = read()
        names = sorted(type(old).model_fields)
        changes = [name for name in names if getattr(settings, name) != getattr(old, name)]
        update = {name: getattr(settings, name) for name in changes if name in reloadable}
        new = old.model_copy(update=update)
        apply(new)
    except (WrongSettings, BadSecret) as wrong:
        for sentence in wrong.args:
            log.error("settings stay as they were: %s", sentence)
        return
    write_log_to_stderr(process, new)
    for name in changes:
        if name in reloadable:
            log.info("%s was changed", name)
        else:
            log.warning("%s needs a restart and was not changed", name)
    log.info("settings were read again")
