"""Tasks from a user's file: `path/to/file.py:make_task`, a function whose keyword parameters are the task's options.

The function returns a `Task`, as `own_task` makes one. A parameter called `seed` gets the run's. A run records the
file's full path and checksum. It is resumed only if the file has not changed: a changed file could make another task.
"""

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedprior.catalogue.tasks.base import Task
from fedprior.core.errors import FedpriorError, RunError, SettingError, described
from fedprior.core.options import Option, convert, nearest

CHECKSUM = "source_sha256"
"""The name of the file's checksum among the task's options in a run."""


def is_file(name: str) -> bool:
    """Whether a task's name names a function in a file."""
    return name.endswith(".py") or ".py:" in name


def short(name: str) -> str:
    """A task's name for a folder; for a function in a file, the function's name."""
    return name.rsplit(":", 1)[-1] if is_file(name) else name


def full(name: str) -> str:
    """The name with the file's full path, so that a run can be resumed from anywhere."""
    path, function = _parts(name)
    return f"{path}:{function}"


def file_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the function, and the file's checksum; options not given have their defaults, or None."""
    path, _ = _parts(name)
    known, now = _options(_function(name)), _checksum(path)
    if given.get(CHECKSUM, now) != now:
        raise RunError(f"{path} has changed since the run was started; restore it, or pass task=… in Python")
    for key in given:
        if key not in known and key != CHECKSUM:
            raise nearest(key, known, f"setting of {short(name)}")
    found = {
        key: convert(option, given[key])
        if key in given
        else None
        if option.default is inspect.Parameter.empty
        else option.default
        for key, option in known.items()
    }
    return {**found, CHECKSUM: now}


def file_task(name: str, seed: int, given: Mapping[str, Any]) -> tuple[Task, dict[str, Any]]:
    """The task that the function makes, and its options."""
    function, options = _function(name), file_options(name, given)
    for key, option in _options(function).items():
        if option.default is inspect.Parameter.empty and key not in given:
            raise SettingError(f"{short(name)} needs {key}: --set {key}=…")
    arguments = {key: value for key, value in options.items() if key != CHECKSUM}
    if "seed" in inspect.signature(function).parameters:
        arguments["seed"] = seed
    made = _guarded(_parts(name)[0], lambda: function(**arguments))
    if not isinstance(made, Task):
        raise SettingError(
            f"{short(name)} of {_parts(name)[0]} returned {described(made)}; "
            "return a task made by fedprior.own_task(model, clients)"
        )
    return made, options


def made_by(name: str, *given: Any) -> Any:
    """What a function in a file makes from these arguments."""
    function = _function(name)
    return _guarded(_parts(name)[0], lambda: function(*given))


def _parts(name: str) -> tuple[Path, str]:
    """The file's full path, and the function's name."""
    file, _, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise SettingError(f"there is no file {file}")
    if not function.isidentifier():
        raise SettingError(f"name the function that makes it, such as {file}:make_task")
    return path, function


def _function(name: str) -> Callable[..., Any]:
    path, wanted = _parts(name)
    module = _module(path, _checksum(path))
    found = getattr(module, wanted, None)
    if not inspect.isfunction(found):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        there = f"it has {', '.join(own)}" if own else "it has none"
        raise SettingError(f"{path} has no function {wanted!r}; {there}")
    return found


@lru_cache(maxsize=8)
def _module(path: Path, checksum: str) -> Any:
    """The file as a module. It runs once, unless it changes, and may import its neighbours."""
    spec = importlib.util.spec_from_file_location(f"fedprior_task_{path.stem}_{checksum}", path)
    assert spec is not None
    assert spec.loader is not None
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[spec.name] = module  # dataclasses look up their module
    # Its neighbours; and, if it is part of a package, that package.
    for place in [path.parent, *([path.parent.parent] if (path.parent / "__init__.py").exists() else [])]:
        if str(place) not in sys.path:
            sys.path.append(str(place))
    _guarded(path, lambda: loader.exec_module(module))
    return module


def _guarded(path: Path, call: Callable[[], Any]) -> Any:
    """Turn what a user's code raises into one line that says where; our own errors stay as they are."""
    try:
        return call()
    except FedpriorError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        lines += [error.lineno] if isinstance(error, SyntaxError) else []
        where = f", line {lines[-1]}" if lines else ""
        words = " ".join(str(error).split())[:300]
        raise SettingError(f"{path}{where}: {type(error).__name__}: {words}") from error


def _options(function: Callable[..., Any]) -> dict[str, Option]:
    """The function's parameters except its seed; those without an annotation have their default's type.

    A parameter whose default no config could hold is not an option.
    """
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except (NameError, TypeError, SyntaxError):  # an annotation that cannot be read
        parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "seed"]
    plain = [p for p in named if p.default is p.empty or isinstance(p.default, bool | int | float | str | None)]
    return {p.name: Option(p.name, _kind(p), p.default) for p in plain}


def _kind(parameter: inspect.Parameter) -> Any:
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    return str if parameter.default in (parameter.empty, None) else type(parameter.default)


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
