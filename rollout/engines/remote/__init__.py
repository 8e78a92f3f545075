"""Clients of frozen models behind an API, which reply in text and are never trained.

- `client.py`: `RemoteClient`, which plays an agent of a team
- `caller.py`: calls with cache, budget, retries and deadlines, for agents and for the coach
- `ledger.py`: replies and spending, in a SQLite file
- `providers.py`: the vendors' APIs; `registry.py` finds one by its name
- `keys.py`: API keys

The names below are those that a provider of the user's own needs.
"""

from rollout.engines.remote.config import RemoteConfig as RemoteConfig
from rollout.engines.remote.errors import RemoteError as RemoteError
from rollout.engines.remote.keys import ApiKey as ApiKey
from rollout.engines.remote.protocol import Answer as Answer
from rollout.engines.remote.protocol import Provider as Provider
from rollout.engines.remote.protocol import ReplySettings as ReplySettings
