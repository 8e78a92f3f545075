"""Configuration of a run: its sections, read from a file and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, model_validator
from pydantic_core import from_json, to_json

from mcore_mas.config.credit import CorrectionConfig
from mcore_mas.config.removed import removed_key_error
from mcore_mas.config.run_checks import check_policy_names, check_sections
from mcore_mas.config.run_paths import relocate_paths
from mcore_mas.config.run_sections import RunSections
from rollout.base.error_lines import error_line
from rollout.base.redaction import redact_secrets
from rollout.base.yaml_files import read_yaml

STATES = ("base", "trained")  # states of a run's policies: before training and after it
GAIN = "trained-base"  # the difference of the two, paired by task


class ConfigError(ValueError):
    """A config that cannot be used: one line that says what, where, expected and what to do, without secrets."""

    def __init__(self, line: str) -> None:
        super().__init__(redact_secrets(line))


class RunConfig(RunSections):
    """Everything that determines one run."""

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        """Read a resolved config, as the pipeline wrote it.

        Its paths are rewritten, so that a run can be used from any directory, also after its folder
        was moved or copied (see `relocate_paths`).

        Raises:
            ConfigError: the file is missing, cannot be read, is not YAML or not a mapping, or its values do not
                validate.
        """
        if not path.is_file():
            raise ConfigError(
                f"{path}: no such file; expected a resolved config, results/<run>/config.yaml, which `snakemake` "
                "writes before the first job of the run"
            )
        try:
            values = read_yaml(path)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}); check its permissions, or make it again"
            ) from error
        except yaml.YAMLError as error:
            message = " ".join(str(error).split())
            raise ConfigError(f"{path}: not YAML ({message}); make it again") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path}: holds a {type(values).__name__}; expected a mapping; name another file"
            )
        return cls.from_values(relocate_paths(values, path), str(path))

    @classmethod
    def from_values(cls, values: Any, origin: str) -> RunConfig:
        """Return the config of plain values, with the default correction filled in.

        Args:
            values: nested mappings, as YAML or JSON yields them.
            origin: source of the values, such as a file's path, with which error messages begin.

        Raises:
            ConfigError: a key or a value was removed (see `removed_key_error`), or the values do not validate.
        """
        if isinstance(values, dict):
            removed = removed_key_error(values)
            if removed:
                raise ConfigError(f"{origin}: {removed}")
        try:
            if isinstance(values, dict):
                check_policy_names(
                    values.get("agents"), values.get("policies"), values.get("opponents")
                )
            # Strict validation of JSON, unlike that of Python values, takes a text for a path and a list for a tuple.
            json = to_json(values, inf_nan_mode="constants")
            return _with_default_correction(cls.model_validate_json(json, strict=True))
        except ValidationError as error:
            # The locations in the error have the keys of JSON, which are all texts.
            line = error_line(error, cls, from_json(json))
            raise ConfigError(f"{origin}: {line}") from None
        except ValueError as error:  # also UnknownName
            raise ConfigError(f"{origin}: {error}") from None

    @model_validator(mode="after")
    def _check_sections(self) -> RunConfig:
        check_sections(self)
        return self


def _with_default_correction(config: RunConfig) -> RunConfig:
    """Set the correction `tis` if a trained policy's log-probabilities are not in float32.

    A correction that the config sets is kept, also `none`.
    """
    all_float32 = all(config.precision_of(policy) == "float32" for policy in config.trained)
    if "correction" in config.loss.model_fields_set or all_float32:
        return config
    loss = config.loss.model_copy(update={"correction": CorrectionConfig(name="tis")})
    return config.model_copy(update={"loss": loss})
