"""Weight sync into running SGLang servers: buckets of tensors, and the session around an update.

`PushSender` is the base of the two transports that push: `tensor` (`cuda_ipc.py`) and `distributed`
(`process_group.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from torch import Tensor

from rollout.base.errors import EngineError
from rollout.models.tensors import WeightStream, buckets, check_stream, join_blocks, tensor_shapes
from rollout.sync.transport import (
    PUSHED_BUCKET_BYTES,
    SentWeights,
    SyncRoute,
    WeightSender,
)

LOAD_FORMAT = "flattened_bucket"  # SGLang's name for full tensors, one after another in one buffer
REQUEST_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S = 30.0  # a lost node does not answer at all


class PushSender(WeightSender):
    """Sender of full tensors to SGLang servers, which pause meanwhile.

    Only rank 0 sends requests. If one fails, every rank raises at the same tensor of the stream: a
    rank that continued would wait for the others in a gather that they never reach.

    Attributes:
        urls: URLs of the servers.
        http: client for the requests to the servers.
        bucket_bytes: maximum size of a bucket; a tensor that is larger has a bucket of its own.
    """

    def __init__(self, route: SyncRoute, **ranks: Any) -> None:
        super().__init__(route, **ranks)
        self.urls = route.target.split()
        headers = {}
        if route.servers.key:
            headers["Authorization"] = f"Bearer {route.servers.key}"
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        self.http = httpx.Client(headers=headers, trust_env=False, timeout=timeout)
        self.bucket_bytes = PUSHED_BUCKET_BYTES
        self._shapes = tensor_shapes(route.model)
        self._pool = ThreadPoolExecutor(max_workers=len(self.urls) + 1)
        # Responses of the servers to the last bucket.
        self._responses: Sequence[Future[None]] = ()
        self._in_flight: Any = None  # the last bucket, as long as servers may read it

    def write(self, weights: WeightStream, version: int, half: int | None) -> SentWeights:
        """Push all tensors to the servers, bucket by bucket.

        Raises:
            EngineError: a server cannot be reached or refuses a bucket. The servers may then hold
                a mixture of old and new weights.
        """
        size = 0
        try:
            with self._session():
                for bucket in buckets(self._full_tensors(weights), self.bucket_bytes):
                    size += sum(tensor.nbytes for _, tensor in bucket)
                    self.send_bucket(bucket, version)
        finally:
            self._responses = ()
            self._in_flight = None
            if torch.cuda.is_available():
                # Memory that servers have released would otherwise stay allocated until the next
                # update.
                torch.cuda.ipc_collect()
        return SentWeights(location=self.route.target, bytes=size)

    @abstractmethod
    def send_bucket(self, bucket: Sequence[tuple[str, Tensor]], version: int) -> None:
        """Send one bucket to all servers; return before they have loaded it."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin an update on all servers. Called on rank 0."""
        try:
            self._post_session("/begin_weight_update")
        except EngineError:
            # The server may still be in the session of a trainer that died during an update.
            with suppress(EngineError):
                self._post_session("/end_weight_update")
            self._post_session("/begin_weight_update")

    def settle(self) -> None:
        """Wait until the servers have loaded the last bucket. Called on rank 0."""
        wait_for(self._responses)

    def post(self, path: str, bodies: Sequence[Mapping[str, Any] | None]) -> list[Future[None]]:
        """Start sending each server its body, and return the futures of their answers."""
        return [
            self._pool.submit(self._post_one, url + path, body)
            for url, body in zip(self.urls, bodies, strict=True)
        ]

    def on_rank_0(self, act: Callable[[], None]) -> None:
        """Call `act` on rank 0 while the other ranks wait; raise its EngineError on every rank."""
        problem = ""
        if self.rank == 0:
            try:
                act()
            except EngineError as error:
                problem = str(error)
        problem = self.all_gather(problem)[0]
        if problem:
            raise EngineError(problem)

    def _full_tensors(self, weights: WeightStream) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and full tensors of a stream, and check them against the model's shapes."""
        for name, rows in check_stream(weights, self._shapes):
            yield name, join_blocks(rows).detach()

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Begin an update before this block, and end it afterwards.

        After a failure, the servers' session is ended too, because they refuse to begin another one.
        """
        try:
            self.on_rank_0(self.begin)
            yield
            self.on_rank_0(self._end)
        except BaseException:
            if self.rank == 0:
                with suppress(EngineError):  # the first failure is the one to raise
                    self.settle()
                with suppress(EngineError):
                    self._post_session("/end_weight_update")
            raise

    def _end(self) -> None:
        """End an update on all servers, and drop their prefix caches. Called on rank 0."""
        self.settle()
        self._post_session("/end_weight_update")
        # All servers are still paused, so no later cache entry is computed with old weights.
        wait_for(self.post("/flush_cache", [None] * len(self.urls)))

    def _post_session(self, path: str) -> None:
        """Call all servers to begin or end a session, if they have sessions."""
        if self.route.servers.sessions:
            wait_for(self.post(path, [{}] * len(self.urls)))

    def _post_one(self, url: str, body: Mapping[str, Any] | None) -> None:
        try:
            response = self.http.post(url, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"SGLang at {url}: {error or type(error).__name__}") from error
        answer = {}
        if "json" in response.headers.get("content-type", ""):
            answer = response.json()
        if response.status_code != 200 or answer.get("success") is False:
            message = " ".join(str(answer.get("message") or response.text).split())[:300]
            raise EngineError(f"SGLang at {url}: status {response.status_code}: {message}")


def wait_for(futures: Sequence[Future[Any]], return_when: str = ALL_COMPLETED) -> None:
    """Wait for futures as `concurrent.futures.wait` does; raise the exception of a failed one."""
    done, _ = wait(futures, return_when=return_when)
    for future in futures:
        if future in done:
            future.result()


def flatten(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Tensor, list[Any]]:
    """Copy tensors into one uint8 buffer [bytes]; return it with SGLang's metadata of each tensor.

    Wider types come first, because a view as a type must begin at a multiple of its size. SGLang
    0.5.23 reads the metadata by attribute (`_update_weights_from_flattened_bucket` in
    model_runner_components/weight_updater.py) and allows `SimpleNamespace` in its unpickler, so
    its own class `FlattenedTensorMetadata` is not needed here.
    """
    ordered = sorted(tensors, key=lambda entry: -entry[1].element_size())
    flat = torch.cat(
        [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in ordered]
    )
    metadata: list[Any] = []
    end = 0
    for name, tensor in ordered:
        start = end
        end += tensor.nbytes
        metadata.append(
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=tensor.nbytes,  # elements of the uint8 buffer
            )
        )
    return flat, metadata
