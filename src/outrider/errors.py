"""Every error that Outrider raises on purpose.

    OutriderError
    ├── UserError (also ValueError)      what you asked for cannot be done; the CLI prints it and exits with 2
    │   ├── ConfigError                  an option or parameter has a value that is not allowed
    │   ├── RequestError                 a prompt or a sampling parameter of one request
    │   ├── ModelNotFoundError           a name that is no path, no catalogue entry, no package
    │   ├── ModelFileError               a file that is truncated, corrupt, unsafe, or of an unknown architecture
    │   ├── PairingError                 a draft that does not fit its target
    │   └── MissingExtraError            an optional dependency is not installed
    └── FetchError                       a download failed, or its checksum is wrong

A message says what is wrong, with which values, what is allowed, and what to do. Broken invariants of our own are
`assert`s, never one of these.
"""


class OutriderError(Exception):
    """The root: catch this to catch everything that Outrider raises on purpose."""


class UserError(OutriderError, ValueError):
    """The request cannot be done as asked; nothing was changed."""


class ConfigError(UserError):
    """An option or parameter has a value that is not allowed."""


class RequestError(UserError):
    """A prompt or a sampling parameter of a single request is not allowed."""


class ModelNotFoundError(UserError):
    """A model name that resolves to nothing."""


class ModelFileError(UserError):
    """A model file that is truncated, corrupt, unsafe to load, or of an unknown architecture."""


class PairingError(UserError):
    """A draft model or drafter that does not fit its target."""


class MissingExtraError(UserError):
    """An optional dependency is needed and not installed."""


class FetchError(OutriderError):
    """A download failed or did not match its checksum; no partial file is left under the final name."""
