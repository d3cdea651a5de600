"""What would stop a run is said before anything starts, with the value and what to change."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, Qwen3Config, Qwen3MoeConfig

from miles.config import ConfigError, Resolved, load
from miles.core.model.config import LoraConfig, ModelConfig
from miles.run import footprint, machine, preflight
from miles.run.recipe import RLRecipe, SFTRecipe
from rollout.config import RolloutConfig
from tests.trainer_cases import make_sample
from trainer.config import TrainerConfig


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`recipe("a.b=c")`: a recipe that passes every check, changed by overrides."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "a"}\n', encoding="utf-8")

    def make(*overrides: str) -> Resolved[RLRecipe]:
        return load(RLRecipe, None, [f"model.path={tiny_model}", 'data.paths=["train.jsonl@[0:1]"]', *overrides])

    return make


def refused(resolved: Resolved[RLRecipe], *, resume: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight.check_rl(resolved, resume=resume)
    return str(caught.value)


def test_a_sound_recipe_passes(recipe):
    preflight.check_rl(recipe())


def test_a_run_folder_that_is_not_empty_is_refused(recipe):
    Path("old").mkdir()
    Path("old/metrics.jsonl").touch()
    assert "run.folder = 'old' is not empty (it holds metrics.jsonl)" in refused(recipe("run.folder=old"))


def test_the_same_folder_is_taken_on_resume(recipe):
    Path("old").mkdir()
    Path("old/metrics.jsonl").touch()
    preflight.check_rl(recipe("run.folder=old"), resume=True)


def test_resume_without_a_run_is_refused(recipe):
    assert "run.folder = 'none' holds no run to go on with" in refused(recipe("run.folder=none"), resume=True)


def test_a_model_path_that_is_no_folder_is_refused(recipe):
    assert "model.path = './no/model' is no folder" in refused(recipe("model.path=./no/model"))


def test_a_home_folder_that_was_not_expanded_is_explained(recipe):
    assert "'~' is not expanded" in refused(recipe("model.path=~/model"))


@pytest.mark.parametrize("path", ["", "."])
def test_a_folder_without_a_model_is_refused(recipe, path):
    assert f"model.path = {path!r} " in refused(recipe(f"model.path={path}"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 999\n",
        b'\x38\0\0\0\0\0\0\0{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   \0\0\0\0',
    ],
    ids=["empty", "pointer", "cut short"],
)
def test_weights_that_did_not_arrive_whole_are_refused_by_name(recipe, tmp_path, content):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "m/model.safetensors").write_bytes(content)
    assert "'m/model.safetensors'" in refused(recipe("model.path=m"))


def test_no_data_is_refused(recipe):
    assert "data.paths is empty" in refused(recipe("data.paths=[]"))


def test_a_misspelt_data_file_names_the_nearest(recipe):
    assert "'trian.jsonl' is no file; did you mean 'train.jsonl'?" in refused(recipe('data.paths=["trian.jsonl"]'))


def test_evaluation_data_is_checked_only_when_it_will_be_used(recipe):
    preflight.check_rl(recipe('evaluate.data.paths=["none.jsonl"]'))
    assert "evaluate.data.paths: 'none.jsonl' is no file" in refused(recipe('evaluate.data.paths=["none.jsonl"]', "evaluate.every=5"))


def test_a_misspelt_reward_names_the_nearest(recipe):
    assert "'exact_mach'; did you mean 'exact_match'?" in refused(recipe('reward.functions=[{name="exact_mach"}]'))


def test_a_part_weight_of_a_reward_that_is_not_there_names_the_nearest(recipe):
    assert "'exact_macht', which is no reward function of this recipe; did you mean 'exact_match'?" in refused(
        recipe("algorithm.part_weights={exact_macht=2.0}")
    )


def test_a_reward_whose_module_is_missing_is_refused(recipe):
    assert "no module named 'my_rewards_are_nowhere'" in refused(recipe('reward.functions=[{name="my_rewards_are_nowhere:score"}]'))


def test_a_stale_ray_address_is_refused(recipe, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert f"RAY_ADDRESS = '{address}', but nothing answers there" in refused(recipe())


def test_a_stale_ray_address_does_not_matter_to_a_recipe_that_names_a_cluster(recipe, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    preflight.check_rl(recipe("cluster.address=local"))


def test_resources_of_the_cluster_at_ray_address_are_not_those_of_this_machine(recipe, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listening.getsockname()[1]}")
        preflight.check_rl(recipe("trainer.ranks=300"))


def test_a_cluster_address_that_does_not_answer_is_refused(recipe):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    assert f"cluster.address = '{address}', but nothing answers there" in refused(recipe(f"cluster.address={address}"))


def test_more_cpus_than_there_are_shows_the_arithmetic(recipe):
    message = refused(recipe("trainer.ranks=300", "trainer.threads=2", "rollout.engines=3"))
    assert "300 trainer ranks x 2 + 3 engines x 1 = 603 CPUs" in message
    assert "cluster.cpus=603" in message


@pytest.mark.parametrize(
    ("options", "arithmetic"),
    [
        (["trainer.ranks=2", "trainer.gpus_per_rank=0.5"], "2 trainer ranks x 0.5 = 1 GPUs"),
        (["rollout.gpus_per_engine=2", "rollout.engine=sglang", "trainer.gpus_per_rank=1"], "1 trainer rank x 1 + 1 engine x 2 = 3 GPUs"),
    ],
)
def test_gpus_of_a_machine_without_are_refused(recipe, options, arithmetic):
    message = refused(recipe("cluster.cpus=3", *options))
    assert f"the run needs {arithmetic}, but this machine shows 0 to torch" in message


@pytest.mark.parametrize("option", ["rollout.prompts_per_step=1000000000", "run.max_staleness=1000000000"])
def test_batches_that_do_not_fit_into_memory_are_refused(recipe, option):
    assert "prompts x 8 samples x 256 tokens x 17 B = " in refused(recipe(option))


def test_a_token_of_a_batch_has_as_many_bytes_as_are_counted():
    sample = make_sample(0, 0, prompt=1, response=100)
    held = sum(array.nbytes for array in (sample.tokens[1:], sample.loss_mask, sample.logprobs, sample.weight_versions))
    terms = footprint.batch_terms(RolloutConfig(prompts_per_step=2**10, samples_per_prompt=1, max_new_tokens=2**10), TrainerConfig(ranks=2), 3)
    assert list(terms.values()) == [held // 100 * (4 + 2)]


def test_more_memory_than_there_is_shows_the_arithmetic(recipe):
    message = refused(recipe("trainer.ranks=100000", "cluster.cpus=200000"))
    assert "100000 trainer ranks x 450 = 45000000" in message
    assert "MiB are free" in message


def test_a_critic_is_counted_and_its_folder_checked(recipe, tiny_model):
    ppo = ("algorithm.advantages=gae", "trainer.ranks=100000", "cluster.cpus=200000")
    assert "100000 x the whole critic while it loads" in refused(recipe(*ppo, f"critic.path={tiny_model}"))
    assert "critic.path = './none' is no folder" in refused(recipe(*ppo, "critic.path=./none"))
    count = 10**6
    alone = {"critic: 1,000,000 parameters x 16 B": 16}
    assert footprint.critic_terms(count, TrainerConfig(ranks=2), whole=False) == alone
    assert footprint.critic_terms(count, TrainerConfig(ranks=2), whole=True) == alone | {"2 x the whole critic while it loads": 8}


def test_balanced_experts_of_a_dense_model(recipe):
    assert "trainer.balance_coef = 0.01 is for qwen3_moe models, and model.path is a qwen3" in refused(recipe("trainer.balance_coef=0.01"))


def test_replicas_hold_the_model_once_each():
    held = [footprint.trainer_terms(ModelConfig(path="m"), TrainerConfig(ranks=4, replicas=n), 10**6, reference=True) for n in (1, 2)]
    assert [sum(size for reason, size in terms.items() if "ranks" not in reason) for terms in held] == [16 + 4, 2 * (16 + 4)]


def test_more_shared_memory_than_there_is_shows_the_arithmetic(recipe):
    assert machine.free_shared_memory() is not None
    message = refused(recipe("cluster.object_store_mb=100000000"))
    assert "cluster.object_store_mb = 100000000 + weights of an update = 1" in message


@pytest.mark.parametrize(
    ("engine", "transport", "more", "needed"),
    [
        ("torch", "tensor", {}, 2000),
        ("torch", "tensor", {"apart": 2}, 4000),
        ("torch", "broadcast", {"apart": 2}, 0),
        ("sglang", "tensor", {}, 2000),
        ("sglang", "broadcast", {}, 6000),
        ("sglang", "tensor", {"apart": 2}, 4000),
        ("sglang", "broadcast", {"apart": 2}, 8000),
        ("sglang", "tensor", {"adapters": True}, 5000),
        ("sglang", "delta", {"adapters": True, "apart": 2}, 13000),
    ],
)
def test_an_update_is_in_shared_memory_whole_beside_what_is_served(engine, transport, more, needed):
    """1000 MiB of float32 in each update, whatever the size of a bucket: files stay until each of three engines has taken all. Two that evaluate
    keep a version of their own, and with adapters each has begun with a file of zeros."""
    rollout = RolloutConfig(engine=engine, engines=3)
    terms = footprint.shared_memory_terms(ModelConfig(path="m"), rollout, transport, 1000 * 2**20 // 4, **more)
    assert sum(terms.values()) == needed


def test_engines_with_adapters_have_the_model_once_and_those_twice(recipe, tiny_model):
    count, size = footprint.parameters(tiny_model), 4
    adapters = footprint.adapter_parameters(tiny_model, LoraConfig(rank=4))
    message = refused(recipe("lora.rank=4", "rollout.engines=100000", "cluster.cpus=200000"))
    assert f"100000 x {count:,} parameters x {size} B = " in message
    assert f"100000 x {adapters:,} parameters of an update x {size} B = " in message
    message = refused(recipe("lora.rank=4", "lora.served=merged", "rollout.engines=100000", "cluster.cpus=200000"))
    assert f"100000 x {count:,} parameters of an update x {size} B = " in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["weight_sync.transport=delta", "weight_sync.store=nothing://here"], "weight_sync.store = 'nothing://here' cannot be opened"),
        (["weight_sync.store=weights"], "weight_sync.store = 'weights' with transport = 'tensor', which has no store"),
    ],
)
def test_a_weight_store_that_cannot_be_used_is_refused(recipe, options, message):
    assert message in refused(recipe(*options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rollout.sglang_args.port=30000"], "sglang_args has port, which each engine chooses by itself"),
        (["rollout.sglang_args.max-running-requests=4"], "sglang_args has max-running-requests = 4: set rollout.max_running instead"),
        (['rollout.sglang_args.tp_size="two"'], "tp_size = 'two', which must be a whole number"),
        (["rollout.sglang_args.tp_size=2", "model.true_on_policy=true"], "model.true_on_policy with rollout.engine = 'sglang' needs one rank on CPU"),
    ],
)
def test_arguments_that_an_sglang_engine_cannot_take_are_refused(recipe, options, message):
    assert message in refused(recipe("rollout.engine=sglang", *options))


def test_a_weight_store_in_the_place_of_a_file_is_refused(recipe):
    Path("afile").touch()
    assert "weight_sync.store = 'afile' is a file" in refused(recipe("weight_sync.transport=delta", "weight_sync.store=afile"))


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models whose layers do not fit everything: `dense`, `moe`, `mistral`, which looks back 16 tokens, `capped`, whose logits are, and
    `long`, whose rotary embedding knows the longest sequence."""
    folder = tmp_path_factory.mktemp("models")
    configs = {
        "dense": Qwen3Config(**SMALL),
        "moe": Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        "mistral": MistralConfig(**SMALL, sliding_window=16),
        "capped": Gemma2Config(**SMALL, final_logit_softcapping=30.0),
        "long": Qwen3Config(**SMALL, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    }
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder


TWO, THREE = (["trainer.ranks=2", "trainer.tensor_parallel=2"], ["trainer.ranks=3", "trainer.tensor_parallel=3"])
HILORE = "trainer.activations=hilore"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("dense", THREE, "trainer.tensor_parallel = 3 does not divide the model's num_attention_heads = 4"),
        ("moe", TWO, "Qwen3MoeExperts (layers.0.mlp.experts: 'moe_tp_experts') is not there yet"),
        ("dense", [*TWO, "lora.rank=4"], "trainer.tensor_parallel = 2 does not go with [lora]"),
        ("dense", [*TWO, "model.true_on_policy=true"], "trainer.tensor_parallel = 2 does not go with model.true_on_policy"),
        ("dense", [HILORE, "model.true_on_policy=true"], "must foresee every byte"),
        ("moe", [HILORE], "is for dense models"),
        ("mistral", [HILORE], "looks back 16 of 131072 tokens"),
        ("moe", ["model.true_on_policy=true"], "has no batch-invariant version: set model.true_on_policy = false"),
        ("capped", [], "config.final_logit_softcapping = 30.0 changes the logits after the output head"),
        ("long", [], "the torch engine cannot decode Qwen3ForCausalLM: its rotary embedding (dynamic) depends on the longest sequence"),
        ("dense", ['trainer.frozen=["nothing.*"]'], "trainer.frozen has 'nothing.*', which matches no parameter"),
        ("dense", ["lora.rank=4", 'trainer.frozen=["nothing.*"]'], "trainer.frozen has 'nothing.*', which matches no parameter"),
        ("dense", ["lora.rank=4", 'trainer.frozen=["*.lora_?.*"]'], "leaves nothing to train"),
        ("dense", ['lora.targets=["nope"]'], "lora.targets has 'nope', which is no linear layer"),
    ],
)
def test_what_a_models_layers_do_not_fit_is_refused(recipe, models, model, options, message):
    assert message in refused(recipe(f"model.path={models / model}", "cluster.cpus=8", *options))


def test_a_critic_whose_layers_do_not_divide_is_refused_by_its_path(recipe, models):
    options = ["cluster.cpus=8", *TWO, "algorithm.advantages=gae", f"critic.path={models / 'moe'}"]
    assert f"the model in '{models / 'moe'}'" in refused(recipe(f"model.path={models / 'dense'}", *options))


def test_what_the_layers_fit_passes(recipe, models):
    preflight.check_rl(recipe(f"model.path={models / 'dense'}", "cluster.cpus=8", *TWO, 'trainer.frozen=["model.embed_tokens.weight"]'))


def test_wandb_online_without_a_key_is_refused(recipe, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert "tracking.wandb = 'online', but there is no key" in refused(recipe("tracking.wandb=online"))


def test_sft_checks_its_own_data(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"data\.paths: 'none\.jsonl' is no file"):
        preflight.check_supervised(load(SFTRecipe, None, [f"model.path={tiny_model}", 'data.paths=["none.jsonl"]']))


def test_parameters_are_counted_from_the_files(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert footprint.parameters(tiny_model) == sum(p.numel() for p in model.parameters())
