"""vLLM as an engine, for models that the native engine does not support.

vLLM runs in the maker's process, one step at a time, with its own copy of the actor's weights and adapters merged in.
With tensor parallelism that process only schedules, and every worker process holds a shard of the copy on its own GPU.
A new copy is written between two steps and verified twice: the sum of its bits must equal that of the weights sent, and
the log-probs of a canary prompt must match the actor's. Nothing is delivered before that. Each copy has its own cache
salt, so that no prompt continues from keys that other weights computed.
"""

import contextlib
import copy
import dataclasses
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coati.errors import ConfigError, EngineFailed, GenerateOptionError, WeightUpdateError
from coati.experience import Sample
from coati.models.actor import action_logprobs, max_rounding_gap, unwrap
from coati.models.calls import context_length_of
from coati.models.lora import plain_name
from coati.models.memory import in_chunks
from coati.models.packing import base_of
from coati.randomness import keyed_generator
from coati.rollout.engine import copied_for_engine
from coati.rollout.sampling import StopStrings, stop_strings_of
from coati.rollout.vllm_workers import (
    begin_update,
    end_update,
    load_chunk,
    remove_shared_memory_at_exit,
    sum_of_bits,
    sums_of_bits,
)
from coati.weights.message import copy_all, layout, specs_of, tensor_views

_CANARY_TOKENS = 32
_CHUNK_BYTES = 256 * 2**20  # maximum size of a chunk of weights in shared memory
_WORKER_SECONDS = 300.0  # deadline for a call of all workers; vLLM's own deadline for a step is the same


@dataclasses.dataclass(eq=False)
class _InFlight:
    """A sample in flight, and its response so far."""

    sample: Sample
    stops: StopStrings | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    stop_state: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(0))

    def add(self, completion: Any, version: int) -> bool:
        """Append new tokens; return whether they complete a stop string."""
        for token, choices in zip(completion.token_ids, completion.logprobs, strict=True):
            self.tokens.append(token)
            self.log_probs.append(choices[token].logprob)
            self.versions.append(version)
            if self.stops is not None:
                self.stop_state = self.stops.advance(self.stop_state, torch.tensor(token))
        return self.stops is not None and int(self.stop_state) == self.stops.found

    def finish(self, device: torch.device, *, is_cut: bool) -> Sample:
        """Return the sample with its response."""
        sample = self.sample
        sample.response = torch.tensor(self.tokens, dtype=torch.long, device=device)
        sample.log_probs = torch.tensor(self.log_probs, device=device)
        sample.versions = torch.tensor(self.versions, dtype=torch.long, device=device)
        sample.is_cut = is_cut
        return sample


class VllmEngine:
    """Generates with vLLM. Draws are keyed by sample id, but differ from those of the other engines.

    `settings` are arguments of vLLM's `EngineArgs`, such as `gpu_memory_utilization`.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if settings.get(name, 1) != 1:
                raise ConfigError(
                    f"rollout.vllm.{name} must be 1, got {settings[name]}. Use tensor_parallel_size or topology.makers."
                )
        self._has_workers = settings.get("tensor_parallel_size", 1) != 1
        backend = "mp" if self._has_workers else "uni"
        if settings.setdefault("distributed_executor_backend", backend) != backend:
            raise ConfigError(
                f'rollout.vllm.distributed_executor_backend must be "{backend}" with this tensor_parallel_size, got '
                f"{settings['distributed_executor_backend']!r}. Remove it."
            )
        self.model = model
        self._settings = settings
        self._engine: Any = None
        self._max_sequences = int(settings.setdefault("max_num_seqs", 256))
        self._weights: tuple[tuple[int, int], ...] = ()  # of the last copy: addresses and version counters
        self._num_copies = 0
        self._keeps_bits = False  # whether vLLM stores the bits of the actor's weights, in any order
        self._canaries: dict[str, Tensor] = {}  # by request: the log-probs that the actor computes
        self._version = 0
        self._waiting: deque[Sample] = deque()
        self._writing: dict[str, _InFlight] = {}  # by request
        self._kept: dict[int, _InFlight] = {}
        self._ended: list[Sample] = []  # held back until the weights are verified
        self._num_requests = 0

    @property
    def room(self) -> int:
        """Number of further samples that vLLM can generate at once."""
        return max(0, self._max_sequences - len(self._waiting) - len(self._writing))

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queue samples; see `RolloutEngine.submit`. Raise GenerateOptionError for options that vLLM cannot follow."""
        options = samples[0].options
        if options.extra:
            raise GenerateOptionError(
                f"vLLM does not support the generate option {', '.join(sorted(options.extra))}. Remove it, or use "
                'rollout.engine = "reference".'
            )
        is_truncated = options.do_sample and (options.top_k > 0 or options.top_p < 1.0 or options.min_p > 0.0)
        if is_truncated and any(sample.needs_log_probs for sample in samples):
            raise GenerateOptionError(
                "vLLM returns log-probs after top_k, top_p and min_p, but training needs those before them. Remove "
                "these options, or use another rollout.engine."
            )
        self._waiting += copied_for_engine(samples)

    @torch.no_grad()
    def advance(self) -> list[Sample]:
        """Run one step of vLLM. Samples are returned once the weights that generated them are verified."""
        if not self._waiting and not self._writing and not self._canaries:
            return []
        # Samples wait here, not in vLLM, so that they get the salt of the weights that prefill them.
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
            elif (in_flight := self._writing.get(output.request_id)) is not None:
                self._process_output(output, in_flight)
        if self._canaries:
            return []
        ended, self._ended = self._ended, []
        return ended

    def _process_output(self, output: Any, in_flight: _InFlight) -> None:
        (completion,) = output.outputs
        has_stopped = in_flight.add(completion, self._version)
        if has_stopped and not output.finished:
            self._engine.abort_request([output.request_id])
        if has_stopped or output.finished:
            del self._writing[output.request_id]
            is_cut = not has_stopped and completion.finish_reason == "length"
            self._ended.append(in_flight.finish(next(self.model.parameters()).device, is_cut=is_cut))
            if in_flight.sample.is_kept:
                self._kept[in_flight.sample.id] = in_flight

    def extend(self, sample_id: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Continue a sample; see `RolloutEngine.extend`. Earlier tokens hit the prefix cache under the same weights."""
        in_flight = self._kept.pop(sample_id)
        self._waiting.appendleft(in_flight.sample.next_turn(in_flight.tokens, tokens, max_new_tokens))

    @torch.no_grad()
    def commit(self, version: int) -> None:
        """Record the version of the weights; see `RolloutEngine.commit`."""
        is_new, self._version = version != self._version, version
        if is_new and self._writing:  # otherwise weights are copied when the next sample starts
            self._copy_weights(next(iter(self._writing.values())).sample.tokens)

    def cancel(self, sample_ids: Collection[int]) -> None:
        """Drop samples; see `RolloutEngine.cancel`."""
        dropped = {*sample_ids}
        self._waiting = deque(sample for sample in self._waiting if sample.id not in dropped)
        self._ended = [sample for sample in self._ended if sample.id not in dropped]
        for sample_id in dropped:
            self._kept.pop(sample_id, None)
        names = [name for name, in_flight in self._writing.items() if in_flight.sample.id in dropped]
        for name in names:
            del self._writing[name]
        if self._canaries and not self._writing and not self._ended:  # no sample needs these weights verified
            names += self._canaries
            self._canaries.clear()
            self._weights = ()  # not verified
        if names:
            self._engine.abort_request(names)

    def _new_engine(self) -> Any:
        """Create a vLLM engine with dummy weights."""
        base = base_of(unwrap(self.model))
        parameter = next(base.parameters())
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run in this process
        if not parameter.is_cuda:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # other actors use these cores too
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        vllm = _import_vllm()
        config = copy.deepcopy(base.config)
        config.architectures = [type(base).__name__]
        # Creating an engine reseeds torch in this process.
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
                "async_scheduling": False,  # or step() would return tokens of an earlier step
                "enable_prefix_caching": True,
                "enforce_eager": not parameter.is_cuda,  # compiling takes minutes on a CPU
                "disable_log_stats": True,
                **self._settings,
                "max_num_seqs": self._max_sequences + 1,  # one more for the canary
            }
            engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        if self._has_workers:
            weakref.finalize(self, engine.engine_core.shutdown)
            self._remover = remove_shared_memory_at_exit([worker.proc.pid for worker in engine.model_executor.workers])
        return engine

    def _copy_weights(self, prompt: list[int]) -> None:
        """Copy the actor's weights to the engine if they have changed, and submit a canary prompt."""
        base = base_of(unwrap(self.model))
        weights = tuple((weight.data_ptr(), weight._version) for weight in base.state_dict().values())
        if weights == self._weights:
            return
        self._weights = ()  # in case copying fails
        if self._has_workers:
            self._send_weights(base)
        else:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": _merged_weights(base)})
        self._check_bits(base)
        self._engine.abort_request([*self._canaries])  # the new weights would compute them
        self._canaries.clear()
        self._weights, self._num_copies = weights, self._num_copies + 1
        tokens = (prompt * 2)[: min(_CANARY_TOKENS, (context_length_of(base) or _CANARY_TOKENS + 1) - 1)]
        ids = torch.tensor([tokens], device=next(base.parameters()).device)
        name = f"canary-{self._num_copies}"
        self._canaries[name] = action_logprobs(self.model, ids, torch.ones_like(ids), len(tokens) - 1)[0][0].float()
        self._send(name, tokens, _import_vllm().SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))

    def _send_weights(self, base: nn.Module) -> None:
        """Update the workers' weights as vLLM's `reload_weights` does, in chunks of memory that all workers map."""
        self._call_workers(begin_update)
        for chunk in in_chunks(_merged_weights(base), _CHUNK_BYTES):
            specs = specs_of(chunk)
            size = layout(specs)[1]
            file = os.memfd_create("coati-weights")  # anonymous, so nothing is left behind if a process is killed
            try:
                path = f"/proc/{os.getpid()}/fd/{file}"
                memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
                copy_all([*tensor_views(memory, specs).values()], [*chunk.values()])
                self._call_workers(load_chunk, path, specs)
            finally:
                os.close(file)
        self._call_workers(end_update)

    def _call_workers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in each worker, or in this process if there are none, and return the results."""
        with self._worker_errors_explained():
            return list(self._engine.collective_rpc(function, timeout=_WORKER_SECONDS, args=arguments))

    @contextlib.contextmanager
    def _worker_errors_explained(self) -> Iterator[None]:
        """Raise EngineFailed if a worker process fails, and stop the others. Pass on most errors of this process.

        vLLM raises RuntimeError for an error in a worker, TimeoutError if one does not answer, and anything if one has
        ended. A RuntimeError of vLLM's own in this process cannot be told from a worker's.
        """
        try:
            yield
        except Exception as error:
            if not self._has_workers or not (
                isinstance(error, RuntimeError | TimeoutError)
                or any(not worker.proc.is_alive() for worker in self._engine.model_executor.workers)
            ):
                raise
            self._engine.engine_core.shutdown()
            raise EngineFailed(
                f"A worker process of vLLM failed, ended or did not answer ({type(error).__name__}: {error}). See the "
                "maker's log. `coati train --resume` continues from the last checkpoint."
            ) from error

    def _check_bits(self, base: nn.Module) -> None:
        """Compare sums of bits. If the first copy differs, vLLM converts weights, and only the canary verifies them."""
        names = {plain_name(name) for name, _ in base.named_parameters()}  # tied weights once
        sent = sum(sum_of_bits(weight) for name, weight in _merged_weights(base) if name in names)
        shards = zip(*self._call_workers(sums_of_bits), strict=True)
        # All workers hold the same values of a weight that is not split.
        found = sum(sums[0] if len({*sums}) == 1 else sum(sums) for sums in shards)
        if self._num_copies and self._keeps_bits and found != sent:
            raise WeightUpdateError(
                "the weights in vLLM differ from those that were copied to it. Use another version of vLLM, or "
                'rollout.engine = "reference".'
            )
        self._keeps_bits = found == sent

    def _check_canary(self, output: Any) -> None:
        wanted = self._canaries.pop(output.request_id)
        tokens = output.prompt_token_ids
        found = [choices[token].logprob for token, choices in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
        gap = float((torch.tensor(found) - wanted.cpu()).abs().mean())
        if not gap <= max_rounding_gap(next(self.model.parameters()).dtype):
            self._weights = ()
            raise WeightUpdateError(
                f"after a weight update, log-probs of vLLM and the actor differ by {gap:.3g} on average. vLLM may "
                'implement the model differently. Use rollout.engine = "reference".'
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
            ignore_eos=True,  # stop_token_ids has the model's, unless the options override them
            logprobs=0,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )
        self._num_requests += 1
        name = str(self._num_requests)
        stops = None
        if options.stop_strings:
            stops = stop_strings_of(options.tokenizer, options.stop_strings, torch.device("cpu"))
        self._writing[name] = _InFlight(sample, stops)
        self._send(name, sample.tokens, sampling)

    def _send(self, name: str, prompt: list[int], sampling: Any) -> None:
        self._engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": str(self._num_copies)}, sampling)


def _merged_weights(base: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model with its adapters merged in, one at a time, under their names without adapters."""
    for name, weight in base.state_dict().items():
        layer, _, kind = name.rpartition(".base_layer.")
        if kind == "weight":
            adapted: Any = base.get_submodule(layer)
            delta = sum(adapted.get_delta_weight(adapter) for adapter in adapted.active_adapters)
            yield plain_name(name), (weight + delta).to(weight.dtype)
        elif ".lora_" not in name:
            yield plain_name(name), weight


def _import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            f'rollout.engine = "vllm" needs vLLM, which cannot be imported ({error}). '
            "Run pip install '.[vllm]' in your clone of coati."
        ) from error
    return vllm
