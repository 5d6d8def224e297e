"""vLLM as an engine: for models that the native engine does not know.

vLLM runs in the maker's process, a step at a time, with its own copy of the actor's weights, adapters merged into them.
With tensor parallelism that process only schedules: every shard of the copy is in a worker process, on its own GPU.
A new copy is written between two steps and proven twice: its bits must have the same sum as those that were sent, and
the log-probs of a canary prompt must be the actor's. Nothing is delivered before that. Each copy has a salt of its own,
so that no prompt is continued from cached keys of other weights.
"""

import contextlib
import copy
import dataclasses
import functools
import os
import re
import subprocess
import tempfile
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coati.errors import CoatiError, ConfigError, EngineFailed, GenerateOptionError, WeightUpdateError
from coati.experience import Sample
from coati.models.actor import action_logprobs, unwrap
from coati.models.calls import context_length_of
from coati.models.lora import plain_name
from coati.models.packing import base_of
from coati.randomness import keyed_generator
from coati.rollout.engine import admitted
from coati.rollout.sampling import StopStrings, stop_strings_of
from coati.weights.message import TensorSpec, copy_all, layout, specs_of, views

_CANARY_TOKENS = 32
# The mean gap of log-probs that rounding cannot explain, in float32 and in shorter formats.
_EXACT_GAP, _ROUNDED_GAP = 1e-3, 0.1
# Weights for worker processes pass through shared memory of this size; a larger tensor is alone in its own.
_CHUNK_BYTES = 256 * 2**20
_WORKER_SECONDS = 300.0  # to load one; vLLM has the same deadline for a step


@dataclasses.dataclass(eq=False)
class _Written:
    """A sample, and its response as far as it has come."""

    sample: Sample
    stops: StopStrings | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    stop_state: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(0))

    def add(self, completion: Any, version: int) -> bool:
        """Take in what was written; returns whether a stop string is there."""
        for token, choices in zip(completion.token_ids, completion.logprobs, strict=True):
            self.tokens.append(token)
            self.log_probs.append(choices[token].logprob)
            self.versions.append(version)
            if self.stops is not None:
                self.stop_state = self.stops.advance(self.stop_state, torch.tensor(token))
        return self.stops is not None and int(self.stop_state) == self.stops.found

    def ended(self, device: torch.device, *, is_cut: bool) -> Sample:
        """The sample with its response."""
        sample = self.sample
        sample.response = torch.tensor(self.tokens, dtype=torch.long, device=device)
        sample.log_probs = torch.tensor(self.log_probs, device=device)
        sample.versions = torch.tensor(self.versions, dtype=torch.long, device=device)
        sample.is_cut = is_cut
        return sample


class VllmEngine:
    """Generates with vLLM. Draws are keyed by sample id; they are others than those of our engines.

    `settings` are arguments of vLLM's `EngineArgs`, such as `gpu_memory_utilization`.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if settings.get(name, 1) != 1:
                raise ConfigError(
                    f"rollout.vllm.{name} must be 1, got {settings[name]}. Use tensor_parallel_size, or more makers "
                    "(topology.makers)."
                )
        is_parallel = settings.get("tensor_parallel_size", 1) != 1
        self._has_workers = settings.setdefault("distributed_executor_backend", "mp" if is_parallel else "uni") != "uni"
        self.model = model
        self._settings = settings
        self._engine: Any = None
        self._max_sequences = int(settings.setdefault("max_num_seqs", 256))
        self._weights: tuple[tuple[int, int], ...] = ()  # which it has: where they lay, and how often they had changed
        self._num_copies = 0
        self._keeps_bits = False  # whether vLLM's weights have the bits of the actor's, in any order
        self._canaries: dict[str, Tensor] = {}  # by request, what the actor computes
        self._version = 0
        self._waiting: deque[Sample] = deque()
        self._writing: dict[str, _Written] = {}  # by request
        self._kept: dict[int, _Written] = {}
        self._ended: list[Sample] = []  # not returned before the weights are proven
        self._num_requests = 0

    @property
    def room(self) -> int:
        """Of the sequences that vLLM computes at the same time."""
        return max(0, self._max_sequences - len(self._waiting) - len(self._writing))

    def submit(self, samples: Sequence[Sample]) -> None:
        """As the protocol says; GenerateOptionError where vLLM cannot do what the options say."""
        options = samples[0].options
        if options.extra:
            raise GenerateOptionError(
                f"vLLM does not know the generate option {', '.join(sorted(options.extra))}. Leave it out, or use "
                'rollout.engine = "reference".'
            )
        is_cut = options.do_sample and (options.top_k > 0 or options.top_p < 1.0 or options.min_p > 0.0)
        if is_cut and any(sample.needs_log_probs for sample in samples):
            raise GenerateOptionError(
                "vLLM returns log-probs of what top_k, top_p and min_p leave, and training needs those before the cut. "
                "Leave these options out, or use another rollout.engine."
            )
        self._waiting += admitted(samples)

    @torch.no_grad()
    def advance(self) -> list[Sample]:
        """Let vLLM take one step. Nothing is returned before the weights that it was written by are proven."""
        if not self._waiting and not self._writing and not self._canaries:
            return []
        # What waits here is admitted with the salt of the weights that will read it.
        if self._engine is None:
            self._engine = self._new_engine()
        if self._waiting and len(self._writing) < self._max_sequences:
            self._copy_weights(self._waiting[0].tokens)
        while self._waiting and len(self._writing) < self._max_sequences:
            self._add(self._waiting.popleft())
        with self._worker_errors_explained():
            outputs = self._engine.step()
        for output in outputs:
            if output.request_id in self._canaries:
                self._check_canary(output)
            elif (written := self._writing.get(output.request_id)) is not None:
                self._take(output, written)
        if self._canaries:
            return []
        ended, self._ended = self._ended, []
        return ended

    def _take(self, output: Any, written: _Written) -> None:
        (completion,) = output.outputs
        has_stopped = written.add(completion, self._version)
        if has_stopped and not output.finished:
            self._engine.abort_request([output.request_id])
        if has_stopped or output.finished:
            del self._writing[output.request_id]
            is_cut = not has_stopped and completion.finish_reason == "length"
            self._ended.append(written.ended(next(self.model.parameters()).device, is_cut=is_cut))
            if written.sample.is_kept:
                self._kept[written.sample.id] = written

    def extend(self, sample_id: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """As the protocol says; vLLM finds what came before among its cached prefixes, if the weights are the same."""
        written = self._kept.pop(sample_id)
        self._waiting.appendleft(written.sample.next_turn(written.tokens, tokens, max_new_tokens))

    @torch.no_grad()
    def commit(self, version: int) -> None:
        """As the protocol says."""
        is_new, self._version = version != self._version, version
        if is_new and self._writing:  # else the weights are copied when the next is begun
            self._copy_weights(next(iter(self._writing.values())).sample.tokens)

    def cancel(self, sample_ids: Collection[int]) -> None:
        """As the protocol says."""
        gone = {*sample_ids}
        self._waiting = deque(sample for sample in self._waiting if sample.id not in gone)
        self._ended = [sample for sample in self._ended if sample.id not in gone]
        for one in gone:
            self._kept.pop(one, None)
        names = [name for name, written in self._writing.items() if written.sample.id in gone]
        for name in names:
            del self._writing[name]
        if not self._writing and self._canaries:
            names += self._canaries
            self._canaries.clear()
            self._weights = ()  # not proven
        if names:
            self._engine.abort_request(names)

    def _new_engine(self) -> Any:
        """With weights that mean nothing yet."""
        base = base_of(unwrap(self.model))
        parameter = next(base.parameters())
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where weights and steps are
        if not parameter.is_cuda:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # other actors use these cores too
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        vllm = _import_vllm()
        config = copy.deepcopy(base.config)
        config.architectures = [type(base).__name__]
        # It seeds the process that it is made in.
        with torch.random.fork_rng(), tempfile.TemporaryDirectory(prefix="coati-vllm-") as folder:
            config.save_pretrained(folder)
            arguments = {
                "model": folder,
                "tokenizer": None,
                "skip_tokenizer_init": True,
                "load_format": "dummy",
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "max_model_len": context_length_of(base),
                "logprobs_mode": "processed_logprobs",  # at the sampling temperature
                "async_scheduling": False,  # or a token would be older than the step that returns it
                "enable_prefix_caching": True,
                "enforce_eager": not parameter.is_cuda,  # compiling takes minutes there
                "disable_log_stats": True,
                **self._settings,
                "max_num_seqs": self._max_sequences + 1,  # the canary has a place of its own
            }
            engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        if self._has_workers:
            weakref.finalize(self, engine.engine_core.shutdown)
            self._remover = _remove_at_end([worker.proc.pid for worker in engine.model_executor.workers])
        return engine

    def _copy_weights(self, prompt: list[int]) -> None:
        """Give the engine the actor's weights, if they have changed, and send the canary after them."""
        base = base_of(unwrap(self.model))
        weights = tuple((weight.data_ptr(), weight._version) for weight in base.state_dict().values())
        if weights == self._weights:
            return
        self._weights = ()  # unless all of them arrive
        with self._worker_errors_explained():
            if self._has_workers:
                self._send_weights(base)
            else:
                self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": _merged_weights(base)})
            self._check_bits(base)
        self._engine.abort_request([*self._canaries])  # they would be of these weights now
        self._canaries.clear()
        self._weights, self._num_copies = weights, self._num_copies + 1
        tokens = (prompt * 2)[: min(_CANARY_TOKENS, (context_length_of(base) or _CANARY_TOKENS + 1) - 1)]
        ids = torch.tensor([tokens], device=next(base.parameters()).device)
        name = f"canary-{self._num_copies}"
        self._canaries[name] = action_logprobs(self.model, ids, torch.ones_like(ids), len(tokens) - 1)[0][0].float()
        self._send(name, tokens, _import_vllm().SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))

    def _send_weights(self, base: nn.Module) -> None:
        """Do what vLLM's `reload_weights` does, in the workers. Each chunk is in memory that all of them map."""
        rpc = functools.partial(self._engine.collective_rpc, timeout=_WORKER_SECONDS)
        rpc(_begin_update)
        for chunk in _in_chunks(_merged_weights(base)):
            specs = specs_of(chunk)
            size = layout(specs)[1]
            file = os.memfd_create("coati-weights")  # no file in any folder, so none is left whatever is killed
            try:
                path = f"/proc/{os.getpid()}/fd/{file}"
                memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
                copy_all([*views(memory, specs).values()], [*chunk.values()])
                rpc(_load_chunk, args=(path, specs))
            finally:
                os.close(file)
        rpc(_end_update)

    @contextlib.contextmanager
    def _worker_errors_explained(self) -> Iterator[None]:
        """Turn what vLLM raises when a worker process fails into an error of ours, and end the others."""
        try:
            yield
        except Exception as error:
            if not self._has_workers or isinstance(error, CoatiError | torch.OutOfMemoryError):  # the maker's own
                raise
            self._engine.engine_core.shutdown()
            raise EngineFailed(
                f"A worker process of vLLM failed, ended or did not answer ({type(error).__name__}: {error}). See the "
                "maker's log. `coati train --resume` continues from the last checkpoint."
            ) from error

    def _check_bits(self, base: nn.Module) -> None:
        """Compare sums of bits. Where the first differ, vLLM converts weights, and the canary alone proves them."""
        names = {plain_name(name) for name, _ in base.named_parameters()}  # tied ones once
        sent = sum(_sum_of_bits(weight) for name, weight in _merged_weights(base) if name in names)
        shards = zip(*self._engine.collective_rpc(_sums_of_bits, timeout=_WORKER_SECONDS), strict=True)
        # Of a weight that is not split, all workers have the same.
        found = sum(sums[0] if len({*sums}) == 1 else sum(sums) for sums in shards)
        if self._num_copies and self._keeps_bits and found != sent:
            raise WeightUpdateError(
                "vLLM does not have the weights that were copied to it. Try another version of vLLM, or "
                'rollout.engine = "reference".'
            )
        self._keeps_bits = found == sent

    def _check_canary(self, output: Any) -> None:
        wanted = self._canaries.pop(output.request_id)
        tokens = output.prompt_token_ids
        found = [choices[token].logprob for token, choices in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
        gap = float((torch.tensor(found) - wanted.cpu()).abs().mean())
        is_exact = next(self.model.parameters()).dtype in (torch.float32, torch.float64)
        if not gap <= (_EXACT_GAP if is_exact else _ROUNDED_GAP):
            self._weights = ()
            raise WeightUpdateError(
                "vLLM does not compute what the actor does after its weights were copied: log-probs differ by "
                f'{gap:.3g} on average. Its implementation of the model may differ; use rollout.engine = "reference".'
            )

    def _add(self, sample: Sample) -> None:
        vllm, options, generator = _import_vllm(), sample.options, keyed_generator(sample.seed, sample.id)
        sampling = vllm.SamplingParams(
            temperature=options.temperature if options.do_sample else 0.0,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=int(generator.integers(2**62, size=sample.num_drawn + 1)[-1]),
            max_tokens=sample.limit,
            stop_token_ids=list(options.eos_token_ids(unwrap(self.model))),
            ignore_eos=True,  # those of the model's files are among the above, unless the options say otherwise
            logprobs=0,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )
        self._num_requests += 1
        name = str(self._num_requests)
        stops = None
        if options.stop_strings:
            stops = stop_strings_of(options.tokenizer, options.stop_strings, torch.device("cpu"))
        self._writing[name] = _Written(sample, stops)
        self._send(name, sample.tokens, sampling)

    def _send(self, name: str, prompt: list[int], sampling: Any) -> None:
        self._engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": str(self._num_copies)}, sampling)


def _merged_weights(base: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model as it would be without adapters, one at a time, with what they add."""
    for name, weight in base.state_dict().items():
        layer, _, kind = name.rpartition(".base_layer.")
        if kind == "weight":
            adapted: Any = base.get_submodule(layer)
            delta = sum(adapted.get_delta_weight(adapter) for adapter in adapted.active_adapters)
            yield plain_name(name), (weight + delta).to(weight.dtype)
        elif ".lora_" not in name:
            yield plain_name(name), weight


def _in_chunks(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    chunk: dict[str, Tensor] = {}
    for name, weight in weights:
        if chunk and sum(one.nbytes for one in chunk.values()) + weight.nbytes > _CHUNK_BYTES:
            yield chunk
            chunk = {}
        chunk[name] = weight
    yield chunk


def _remove_at_end(workers: Iterable[int]) -> "subprocess.Popen[bytes]":
    """Have the files in shared memory that these processes use removed when this one has ended, however it ends.

    Ray kills a maker with its children, and so what would have removed them. The shell that waits is not one of these,
    and neither its environment nor its files are of the run, by which `coati.ray.warden` finds what to end.
    """
    used = "".join(Path(f"/proc/{worker}/maps").read_text(encoding="utf-8") for worker in workers)
    files = {*re.findall(r"/dev/shm/\S+", used)}
    wait_and_remove = 'exec 3<&0; { read _ <&3; rm -f -- "$@"; } &'  # the pipe is closed when this process has ended
    return subprocess.Popen(
        ["sh", "-c", wait_and_remove, "sh", *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.defpath},
        start_new_session=True,
    )


def _begin_update(worker: Any) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(worker.get_model())


def _load_chunk(worker: Any, path: str, specs: tuple[TensorSpec, ...]) -> None:
    """Load the worker's part of these weights. vLLM keeps those of a layer that is not complete: they stay mapped."""
    from vllm.config import set_current_vllm_config

    memory = torch.from_file(path, size=layout(specs)[1], dtype=torch.uint8)
    with set_current_vllm_config(worker.vllm_config):
        worker.get_model().load_weights(views(memory, specs).items())


def _end_update(worker: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.get_model(), worker.vllm_config.model_config)


def _sums_of_bits(worker: Any) -> list[int]:
    return [_sum_of_bits(weight) for weight in worker.get_model().parameters()]


def _sum_of_bits(weight: Tensor) -> int:
    """The same however weights are joined, turned or filled up with zeros."""
    formats = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(weight.view(formats[weight.element_size()]).sum(dtype=torch.int64))


def _import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            f'rollout.engine = "vllm" needs vLLM, which cannot be imported ({error}). Install coati[vllm].'
        ) from error
    return vllm
