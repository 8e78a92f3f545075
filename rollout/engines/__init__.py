"""Rollout engines: they sample the replies of policies, and take the weights of trained ones.

- `embedded/`: continuous batching in plain torch, in this process or in a Ray actor
- `sglang/`: SGLang servers, over HTTP
- `remote/`: no engine, but frozen models behind an API, in text only

`protocol.py` says what an engine must do, `config.py` has the section `engine` of a run, and
`registry.py` finds an engine by its name. `policy_client.py` and `client.py` connect a team's chats
with an engine. The names below are those that teams and engines of the user's own need.
"""

from rollout.engines.client import EngineClient as EngineClient
from rollout.engines.config import EngineConfig as EngineConfig
from rollout.engines.policy_client import ChatState as ChatState
from rollout.engines.policy_client import PolicyClient as PolicyClient
from rollout.engines.policy_client import PolicyReply as PolicyReply
from rollout.engines.protocol import Engine as Engine
from rollout.engines.protocol import ScoredReply as ScoredReply
from rollout.engines.protocol import ScoringEngine as ScoringEngine
from rollout.engines.protocol import StreamingEngine as StreamingEngine
from rollout.engines.protocol import TokenCallback as TokenCallback
from rollout.engines.protocol import TrainedEngine as TrainedEngine
