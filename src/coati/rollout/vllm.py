"""vLLM as an engine: for models that the native engine does not know.

vLLM runs in the maker's process, a step at a time, with a copy of its own of the actor's weights. When the actor's have
changed, the copy is written over between two steps, and a canary proves it: a prompt whose log-probs by vLLM must be
those of the actor. A batch in which the canary fails is not delivered.

vLLM keeps the keys and values of prompts for others that begin alike. Each copy of the weights has a salt of its own,
so that no prompt is continued from keys of other weights than it was admitted with.
"""

import copy
import os
import tempfile
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coati.errors import ConfigError, GenerateOptionError, WeightUpdateError
from coati.models.actor import action_logprobs, unwrap
from coati.models.calls import context_length_of
from coati.models.packing import base_of
from coati.randomness import keyed_generator
from coati.rollout.engine import Rollout, RolloutRequest
from coati.rollout.sampling import stop_strings_of

_CANARY_TOKENS = 32
# The mean gap of log-probs that rounding cannot explain, in float32 and in shorter formats.
_EXACT_GAP, _ROUNDED_GAP = 1e-3, 0.1
_RAW, _PROCESSED = "raw_logprobs", "processed_logprobs"


class _Written(NamedTuple):
    """A response as far as it has come."""

    tokens: list[int]
    log_probs: list[float]
    versions: list[int]


class VllmEngine:
    """Generates with vLLM. Draws are keyed by sample id; they are others than those of our engines.

    `settings` are arguments of vLLM's `EngineArgs`, such as `gpu_memory_utilization`.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self._model = model
        self._settings = settings
        self._engine: Any = None
        self._log_probs = ""  # the kind that the engine returns
        self._weights: tuple[tuple[int, int], ...] = ()  # which it has: where they lay, and how often they had changed
        self._num_copies = 0
        self._canaries: dict[str, Tensor] = {}  # by request, what the actor computes

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Continue every prompt; the result is as wide as the longest response."""
        engine = self._engine_for(request)
        rows = zip(request.input_ids, request.attention_mask.bool(), strict=True)
        prompts = [tokens[is_real].tolist() for tokens, is_real in rows]
        written = [_Written([], [], []) for _ in prompts]
        is_cut = torch.zeros(len(prompts), dtype=torch.bool)
        stops = _Stops(request)
        waiting, version = deque(range(len(prompts))), request.version
        room = engine.vllm_config.scheduler_config.max_num_seqs
        try:
            self._copy_weights(prompts[0])
            while waiting or engine.has_unfinished_requests():
                # What waits here is admitted with the salt of the weights that will read it.
                while waiting and engine.get_num_unfinished_requests() < room:
                    row = waiting.popleft()
                    self._add(str(row), prompts[row], self._sampling(request, row))
                for output in engine.step():
                    if output.request_id in self._canaries:
                        self._check_canary(output)
                        continue
                    row, (completion,) = int(output.request_id), output.outputs
                    for token, choices in zip(completion.token_ids, completion.logprobs, strict=True):
                        written[row].tokens.append(token)
                        written[row].log_probs.append(choices[token].logprob)
                        written[row].versions.append(version)
                    if stops.found(row, completion.token_ids):
                        engine.abort_request([output.request_id])
                    elif output.finished:
                        is_cut[row] = completion.finish_reason == "length"
                if request.between_tokens is not None:
                    version = request.between_tokens()
                    self._copy_weights(prompts[0])
        finally:
            engine.abort_request([*map(str, range(len(prompts))), *self._canaries])
            if self._canaries:
                self._weights = ()  # not proven
            self._canaries.clear()
        return _rollout(request, written, is_cut, request.options.pad_token(unwrap(self._model)))

    def _engine_for(self, request: RolloutRequest) -> Any:
        options = request.options
        if options.extra:
            raise GenerateOptionError(
                f"vLLM does not know the generate option {', '.join(sorted(options.extra))}. Leave it out, or use "
                'rollout.engine = "reference".'
            )
        is_cut = options.do_sample and (options.top_k > 0 or options.top_p < 1.0 or options.min_p > 0.0)
        if is_cut and options.sampling_temperature != 1.0:
            raise GenerateOptionError(
                "vLLM cannot return log-probs at a temperature other than 1 before top_k, top_p or min_p cut, got "
                f"temperature={options.temperature:g}. Use temperature 1, no cut, or another rollout.engine."
            )
        kind = _RAW if is_cut or not options.do_sample else _PROCESSED
        if self._engine is None or kind != self._log_probs:
            self._engine, self._weights, self._log_probs = None, (), kind
            self._engine = self._new_engine(kind)
        return self._engine

    def _new_engine(self, log_probs: str) -> Any:
        """An engine for a model of this shape, with weights that mean nothing yet."""
        base = base_of(unwrap(self._model))
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
                "logprobs_mode": log_probs,
                "async_scheduling": False,  # or a token would be older than the step that returns it
                "enable_prefix_caching": True,
                "enforce_eager": not parameter.is_cuda,  # compiling takes minutes there
                "disable_log_stats": True,
                **self._settings,
            }
            return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))

    def _copy_weights(self, prompt: list[int]) -> None:
        """Give the engine the actor's weights, if they have changed, and send the canary after them."""
        base = base_of(unwrap(self._model))
        weights = tuple((weight.data_ptr(), weight._version) for weight in base.state_dict().values())
        if weights == self._weights:
            return
        self._weights = ()  # unless all of them arrive
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": list(base.state_dict().items())})
        self._weights, self._num_copies = weights, self._num_copies + 1
        tokens = (prompt * 2)[: min(_CANARY_TOKENS, (context_length_of(base) or _CANARY_TOKENS + 1) - 1)]
        ids = torch.tensor([tokens], device=next(base.parameters()).device)
        name = f"canary-{self._num_copies}"
        self._canaries[name] = action_logprobs(self._model, ids, torch.ones_like(ids), len(tokens) - 1)[0][0].float()
        self._add(name, tokens, _import_vllm().SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))

    def _check_canary(self, output: Any) -> None:
        wanted = self._canaries.pop(output.request_id)
        tokens = output.prompt_token_ids
        found = [choices[token].logprob for token, choices in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
        gap = float((torch.tensor(found) - wanted.cpu()).abs().mean())
        is_exact = next(self._model.parameters()).dtype in (torch.float32, torch.float64)
        if not gap <= (_EXACT_GAP if is_exact else _ROUNDED_GAP):
            self._weights = ()
            raise WeightUpdateError(
                "vLLM does not compute what the actor does after its weights were copied: log-probs differ by "
                f'{gap:.3g} on average. Its implementation of the model may differ; use rollout.engine = "reference".'
            )

    def _add(self, name: str, prompt: list[int], sampling: Any) -> None:
        self._engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": str(self._num_copies)}, sampling)

    def _sampling(self, request: RolloutRequest, row: int) -> Any:
        vllm, options = _import_vllm(), request.options
        return vllm.SamplingParams(
            temperature=options.temperature if options.do_sample else 0.0,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=int(keyed_generator(request.seed, int(request.sample_ids[row])).integers(2**62)),
            max_tokens=int(request.limits[row]),
            stop_token_ids=list(options.eos_token_ids(unwrap(self._model))),
            ignore_eos=True,  # those of the model's files are among the above, unless the options say otherwise
            logprobs=0,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )


def _import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            f'rollout.engine = "vllm" needs vLLM, which cannot be imported ({error}). Install coati[vllm].'
        ) from error
    return vllm


class _Stops:
    """Where stop strings have come, for each row."""

    def __init__(self, request: RolloutRequest) -> None:
        options = request.options
        self._strings = None
        if options.stop_strings:
            self._strings = stop_strings_of(options.tokenizer, options.stop_strings, torch.device("cpu"))
            self._states = torch.zeros(len(request.input_ids), dtype=torch.long)

    def found(self, row: int, tokens: list[int]) -> bool:
        if self._strings is None:
            return False
        for token in tokens:
            self._states[row] = self._strings.advance(self._states[row], torch.tensor(token))
        return int(self._states[row]) == self._strings.found


def _rollout(request: RolloutRequest, written: list[_Written], is_cut: Tensor, pad_token: int) -> Rollout:
    device = request.input_ids.device
    last_version = max(response.versions[-1] for response in written)
    width = max(len(response.tokens) for response in written)

    def padded(rows: list[Any], fill: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype, device=device)

    responses = padded([response.tokens for response in written], pad_token, request.input_ids.dtype)
    lengths = torch.tensor([len(response.tokens) for response in written], device=device)
    mask = torch.arange(width, device=device) < lengths.unsqueeze(1)
    return Rollout(
        sequences=torch.cat([request.input_ids, responses], dim=1),
        attention_mask=torch.cat([request.attention_mask, mask.to(request.attention_mask.dtype)], dim=1),
        action_mask=mask,
        rollout_log_probs=padded([response.log_probs for response in written], 0.0, torch.float32),
        is_cut=is_cut.to(device),
        token_versions=padded([response.versions for response in written], last_version, torch.long),
    )
