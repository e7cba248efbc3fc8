"""Tests run tiny tensors: one thread is faster than two that wait for each other. And which tests are slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
pytest.register_assert_rewrite("chat_visit")  # tests take both a fixture and functions from it

SLOW = (
    # a browser
    "bench/test_timing_page.py",
    "serve/test_api_page.py",
    "serve/test_page.py",
    "serve/test_page_markdown.py",
    "simulate/test_page.py",
    "simulate/test_page_formulas.py::test_a_thousand_random_inputs_agree",
    "simulate/test_page_use.py",
    # a compiler, or a wheel
    "model/test_native_build.py",
    # commands and servers in processes of their own
    "adapt/test_engines.py::test_it_is_checked_and_a_signal_ends_both",
    "adapt/test_engines.py::test_one_that_drafts_badly_is_stopped",
    "bench/test_bench_serving.py",
    "bench/test_bench_steps.py::test_the_command_and_what_follows_it",
    "bench/test_mock_serving_script.py::test_the_whole_of_it",
    "bench/test_moe_batch_script.py",
    "deploy/test_gateways.py",
    "deploy/test_jobs.py::test_slurms_script",
    "deploy/test_manifests.py::test_options_are_those_of_the_command",
    "deploy/test_manifests.py::test_what_the_image_is_asked_is_asked_of_a_server",
    "evals/test_evals_command.py",
    "evals/test_sandbox.py::test_hostile_answers_do_nothing",
    "evals/test_sandbox.py::test_hostile_answers_do_nothing_without_namespaces",
    "model/test_native_lib.py::test_a_forked_child_has_threads_of_its_own",
    "recipes/test_support_tickets.py",
    "record/test_proxy.py",
    "record/test_record_command.py",
    "serve/test_mock.py::test_more_than_the_drafter_drafts_is_refused_when_it_is_loaded",
    "serve/test_mock.py::test_the_command_from_a_config_alone",
    "serve/test_mock.py::test_what_does_not_go_together",
    "serve/test_serve_command.py",
    "simulate/test_simulate_command.py",
    "test_cli.py::test_bad_input_is_one_line_and_exit_code_2",
    "test_cli.py::test_a_missing_model_is_one_line",
    "test_cli.py::test_an_answer_beside_plain_decoding_and_transformers",
    "train/test_attention.py::test_packs_of_every_size_share_what_is_compiled",
    "train/test_distributed.py",
    "train/test_lock.py",
    "train/test_on_ray.py",
    "train/test_ranks.py",
    "train/test_torchrun.py",
    "distill/test_teach.py",
    "flywheel/test_stages.py",
    "flywheel/test_turn.py",
    "train/test_train_run.py",
    # crashes, clients that are waited for, and a hub that is not there
    "hub/test_builtin_on_hub.py::test_a_hub_that_is_not_there_costs_no_time",
    "serve/test_admin.py",
    "serve/test_connections.py",
    "serve/test_crashes.py",
    "serve/test_worker.py",
    "serve/test_worker_grammars.py",
    "serve/test_other_engine.py::test_another_engine_is_served",
    # many random steps, requests, texts or files
    "draft/test_mtp_folder.py",
    "draft/test_mtp.py::test_drafts_are_the_reference_s_and_the_text_is_plain_decoding_s",
    "engine/test_soak.py",
    "serve/test_security.py::test_no_field_takes_the_server_down",
    "serve/test_serve_soak.py",
    "test_routes.py::test_a_member_that_gets_worse_or_better_is_found_out",
    "test_routes.py::test_a_member_with_random_weights_is_abandoned_within_fifty_requests",
    "test_routes.py::test_half_and_half_is_within_three_percent_of_routing_by_hand",
    "simulate/test_serving.py",
    "simulate/test_serving_own_times.py",
    "simulate/test_serving_replay.py",
    "simulate/test_calibrate.py::test_held_out_sizes_are_predicted",
    "simulate/test_calibrate.py::test_least_squares_without_negative_terms",
    "verify/test_mocked.py::test_tokens_per_round_is_met_exactly_in_the_long_run",
    "model/test_hostile_files.py::test_fuzzed_configs",
    "serve/test_tools.py::test_calls_are_found_however_the_text_comes",
    "simulate/test_page_configs.py::test_spoiled_configs_are_read_or_refused_as_python_does",
    "engine/test_prefix.py::test_any_order_of_events_gives_the_text_without_reuse",
    "test_plan.py::TestNeverBelowPlain::test_whatever_the_drafter_and_the_start_up_table",
    # pictures
    "bench/test_html.py",
    # one path beside its slow reference, shape by shape
    "families/test_family_serving.py",
    "families/test_family_text.py",
    "families/test_family_training.py",
    "draft/test_dflash.py::test_decode_path_equals_the_trainable_network",
    "draft/test_dflash.py::test_batched_rounds_equal_row_by_row",
    "draft/test_dflash.py::test_fifty_rounds_as_the_reference",
    "draft/test_dflash.py::test_medium_shape_as_the_reference",
    "draft/test_eagle3.py::test_rounds_are_the_formulas",
    "draft/test_eagle3.py::test_rounds_whose_drafts_stand_are_the_formulas",
    "draft/test_eagle3_checkpoint.py::test_an_embedding_of_its_own_is_used",
    "draft/test_eagle3_checkpoint.py::test_both_styles_are_the_same_drafter",
    "draft/test_training_parity.py",
    "engine/test_grammar.py::test_greedy_answers_are_constrained_plain_decodings",
    "model/test_native_decoder.py",
    "model/test_native_draw.py::test_it_is_pytorch_s",
    "model/test_native_lib.py::test_matrices_are_numpy_s",
    "serve/test_traces_training.py",
    # small trainings, and answers to learn from
    "adapt/test_synthesize.py",
    "train/test_attention.py::test_a_block_sees_neither_other_blocks_nor_documents_nor_what_follows",
    "train/test_attention.py::test_causal_slots_do_not_see_later_ones",
    "train/test_attention.py::test_every_way_equals_the_definition",
    "train/test_attention.py::test_gradients_equal_the_definition",
    "train/test_eagle3_training.py",
    "train/test_mtp_training.py",
    "train/test_checkpoint.py::test_a_full_disk_keeps_the_last_good_checkpoint",
    "train/test_checkpoint.py::test_a_resumed_run_follows_the_uninterrupted_one",
    "train/test_loop.py::test_an_easy_text_is_learned",
    "train/test_loop.py::TestHeldOut::test_looking_teaches_nothing",
    "train/test_loop.py::TestKeepBest::test_the_weights_of_the_best_look_stay",
    "train/test_loop.py::test_every_loss_and_optimiser_learns",
    "train/test_loop.py::test_packs_and_ways_of_attending_change_nothing",
    "train/test_round_starts.py::TestLoop::test_a_resumed_run_follows_the_uninterrupted_one",
    "train/test_round_starts.py::test_the_command_continues_a_drafter_where_its_rounds_begin",
    "train/test_served.py::test_one_sample_of_200_steps_is_drafted_almost_whole",
    "train/test_trainable.py::test_another_network_learns",
    # Transformers or TRL is imported
    "rl/test_rollouts.py::test_log_probabilities_are_the_policys",
    "rl/test_with_trl.py",
    # servers with agents, and small trainings
    "rl/test_agents.py::test_neither_drafts_nor_company_change_a_sample",
    "rl/test_experiments.py::test_both_arms_of_a_drafter_learn_and_are_served",
    # virtual fortnights, and candidates judged by a model
    "adapt/test_replay.py",
    "adapt/test_gate.py::TestJudge::test_the_interval_covers_the_truth",
    "adapt/test_decide.py::TestPolicy::test_a_route_asks_the_scores_at_an_alarm_only",
    "adapt/test_examine.py",
    "adapt/test_adapt_command.py",
    "adapt/test_page.py",
    "adapt/test_real_pool.py",
    "adapt/test_drift.py::TestSeries::test_false_alarms_are_as_rare_as_theory_says",
    # the distribution of sampled answers
    "audit/test_audit.py",
    "audit/test_evidence.py",
    "adapt/test_score.py",
    "engine/test_distribution.py",
    "engine/test_eagle3_rounds.py",
    "engine/test_grammar.py::test_sampled_answers_have_the_constrained_distribution",
    "verify/test_block.py::test_the_real_rule_keeps_eleven_ninths",
    "verify/test_exactness.py::test_enumeration_sees_a_width_chosen_by_the_drawn_tokens",
    "verify/test_exactness.py::test_how_many_are_checked_may_depend_on_what_they_are_drawn_from",
    "verify/test_exactness.py::test_match_stays_exact_however_the_width_is_chosen",
    # the built-in model, whole vocabularies, other libraries' models
    "draft/test_shipped.py",
    "engine/test_grammar.py::test_the_built_in_model_answers_a_schema",
    "model/test_hf.py",
    "model/test_logits.py::test_ties_keep_the_lowest_ids",
    "model/test_tokenizer.py",
    "hub/test_pieces.py::test_builtin_smollm2",
)
"""What `make test-quick` leaves out: files, or tests of a file. Whatever takes more than a second belongs here."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-quick` does not even import a file of slow tests only: that alone takes seconds."""
    place = str(collection_path.relative_to(HERE)) if collection_path.is_relative_to(HERE) else ""
    return True if place in SLOW and config.option.markexpr == "not slow" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.nodeid.removeprefix("tests/").split("[")[0]
        if place in SLOW or place.split("::")[0] in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
