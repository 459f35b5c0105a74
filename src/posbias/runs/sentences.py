"""The sentences of caveats and refusals, by name: what a record keeps as a name and numbers is told by these."""

INTERVENTIONS = {
    "architecture_without_sinks": (
        "an architecture without content has no sinks on its positions, so there is nothing to hide"
    ),
    "architecture_without_learned_sinks": "an architecture has no learned sinks to take out",
    "architecture_without_angle_factor": "the encoding rope of an architecture has no factor on its angles",
    "architecture_without_learned_positions": (
        "learned positions add no logit without content, so an architecture has none to take out"
    ),
    "architecture_without_encoding": (
        "{intervention}: the architecture has no {encoding} to take out (rotary positions of a model add no logit of "
        "their own without content and read as none)"
    ),
    "angles_in_activations": "the angles come with the activations, so other angles need the changed network's own",
    "learned_positions_in_activations": (
        "learned positions are in the activations, so taking them out needs the changed network's own"
    ),
    "stream_passes_alike": "the stream passes by attention and MLPs alike in this theory; one cannot lose it alone",
    "branches_without_residual": "its attention branches have no residual",
    "branches_scaled_by_zero": ("{intervention}: this model's branches are scaled by 0 and the stream is all there is"),
    "window_of_mask_forwards": "{intervention}: the mask {mask} looks forwards; a window needs causal layers",
    "window_within_chunks": (
        "{intervention}: no mask has windows within {mask}; allowed are windows of at least a chunk"
    ),
    "sinks_beyond_prompt": "{intervention}: positions must be below the prompt's {n_positions}, got {positions}",
    "no_learned_sinks": "{intervention}: {family} models have no learned sinks",
    "no_attention": "{intervention}: {family} models have no attention",
    "no_additive_mask": (
        "{intervention}: {family} with {implementation} attention takes no additive mask; allowed are {allowed} "
        "attention of families other than {others}"
    ),
    "no_additive_mask_beside_alibi": (
        "{intervention}: {family} with {implementation} attention and ALiBi takes no additive mask; allowed are "
        "{allowed} attention of families other than {others}"
    ),
    "rope_of_length": (
        "{intervention}: the rope type {rope} takes its frequencies from the prompt's length; default, linear, yarn "
        "and llama3 are allowed"
    ),
    "no_table_of_positions": "{intervention}: {family} models have no table of learned positions",
    "no_rotary_module": "{intervention}: this {family} model has no rotary module to change",
    "made_for_other_families": "{intervention} is made for {allowed}, got a {family} model",
    "no_scale_of_logits": "{intervention}: attention of {family} models has no scale of q.k that could be changed",
    "attention_not_replaceable": (
        "{intervention}: {family} models do not let attention be replaced; allowed are families whose attention goes "
        "through transformers' attention interface, such as llama, qwen2, qwen3, gemma3 and mistral"
    ),
    "key_bias_beside_encoding": "key_biased: no theory has a key bias beside {encoding}; allowed: none and alibi",
    "key_bias_beside_architecture": (
        "key_biased: an architecture holds one encoding per head; only none can be replaced"
    ),
    "biases_by_layer": "key_biased: {given} biases given for {depth} layers; give one or {depth}",
}
"""Why an ingredient cannot be replaced."""

MODELS = {
    "weights_quantised": "the weights are quantised",
    "weights_spread": "the weights are spread over devices",
    "weights_offloaded": "attention and theory read weights in memory, some are offloaded; load the model whole",
    "weights_not_floating": (
        "attention and theory read weights as floating-point numbers, {module} holds them as {storage}; load it "
        "unquantised"
    ),
    "adapter_beside_weights": (
        "attention and theory read weights as they act, and an adapter is beside them; load what merge_and_unload() "
        "of the PeftModel returns"
    ),
    "norm_not_known": "{norm} is not a norm posbias can read; known: LayerNorm and RMS norms",
    "rotary_scaling": "rotary positions scale what they turn by {factor:g}; only 1 is allowed",
    "longrope": "rotary frequencies of longrope depend on the prompt's length; others are allowed",
    "model_not_described": "this {family} model is not described: {because}; unset is allowed",
    "no_description_under": "no description fits the model under {intervention}: {because}",
    "setting_is_set": "{setting} is set",
    "attention_of_other_models": "attention of {got!r} cannot be recomputed; a Hugging Face model is needed",
    "attention_not_recomputable": "attention of this {family} model cannot be recomputed: {because}",
    "attention_implementation": "it runs the attention implementation {got!r}; known are {known}",
    "attention_looks_forwards": "recomputed attention needs causal layers, layer {layer} has the mask {mask}",
    "layers_beyond_attention": (
        "{of} of this {family} model: its layers {layers} mix positions by linear layers, which have no attention "
        "matrix, or not at all; allowed are models with attention alone in every layer"
    ),
    "no_layer_of_attention": (
        "{of} of this {family} model: its layers {layers} mix positions by linear layers, which have no attention "
        "matrix, or not at all; allowed are models with attention in some layer"
    ),
    "reference_layers_linear": (
        "attention of this reference model: its layers {layers} are linear ones (recurrent), which have no attention "
        "matrix; allowed are models with attention in every layer"
    ),
    "reference_layer_without_attention": (
        "a linear layer (recurrent) of this reference model has no attention; theories that take every layer for "
        "attention, and power_rollout, are refused; rollout is allowed"
    ),
}
"""Why a model, or a part of it, cannot be read."""

THEORIES = {
    "theory_of_causal_mask_alone": (
        "theory {theory} holds for mask causal with encoding none only, got mask {mask} with encoding {encoding}"
    ),
    "theory_without_sinks": "theory {theory} holds without attention sinks only",
    "content_not_finite": "content must be finite, got {content}",
    "content_not_recomputable": "content logits need attention that can be recomputed",
    "power_rollout_of_kind": "the power rollout speaks of {known}, and the first kind measured is {kind}",
    "power_rollout_on_one_device": "the power rollout needs all weights on one device, got {got}",
    "no_local_maps": ("the power rollout has no local maps for {got}; give a Hugging Face model or a reference model"),
    "no_theory_of_method": "no theory describes {method}",
    "mean_field_of_described_models": "mean field needs a described model, got {got}",
    "mean_field_of_values": "mean field needs values drawn for every head (gaussian), got {values!r}",
    "mean_field_without_items": "mean field needs to know this model's input vectors; give it items",
    "mean_field_norm_before_positions": (
        "mean field has no embedding norm before positions are added; allowed: either of the two"
    ),
    "mean_field_positions": "mean field with {encoding} takes at most {most} positions, got {n_positions}",
    "mean_field_span": (
        "mean field takes key biases that span at most {most:g} nats; {encoding} spans {span:.0f} over {n_positions} "
        "positions"
    ),
    "mean_field_bins": (
        "mean field needs {bins} bins for {n_positions} positions of this model, at most {most} are allowed: sampled "
        "heads, a distance bias and narrow windows do not reach further"
    ),
    "mean_field_vectors": "mean field takes given vectors at up to {most} positions, got {n_positions}",
    "sampled_heads_positions": "sampled heads take at most {most} positions, got {n_positions}",
    "no_kernel_of_activation": "mean field knows no kernel for this activation; known: {known}",
}
"""Why a theory does not apply."""

NOT_FINITE = {
    "mixing_not_finite": "mixing: |x| + |a| is zero or not finite{where} in layer {layer}; it must be finite and > 0",
    "on_prompt": " on prompt {prompt}",
    "in_embeddings": ", already in the embeddings",
    "first_in_forward": ", first in {block}",
    "first_in_backward": ", first in {block} on the way back",
    "first_after_blocks": ", first after {block}, between the output and the blocks",
    "gradient_of_layers_not_finite": "layers: the gradient of {output} on prompt {prompt} is not finite{where}",
    "output_not_finite": "{kind}: the output on prompt {prompt} is not finite{where}",
    "gradient_not_finite": "{kind}: the gradient on prompt {prompt} is not finite{where}",
    "baseline_not_finite": (
        "{kind}: the score at the baseline {baseline!r} is {score} on prompt {prompt}; the other baseline, or float32, "
        "may be finite"
    ),
    "no_influence": "{kind}: every position of prompt {prompt} has zero influence, so it has no profile",
    "last_state_not_finite": "the model's last state is not finite on a prompt; check its weights for overflow",
    "logits_not_finite": "the model's logits are not finite on a prompt; check its weights for NaN or overflow",
    "energies_not_finite": (
        "the {form} power rollout's energies are not finite; load it in a wider type (float32, float64)"
    ),
    "rollout_not_finite": (
        "the {rollout} rollout of the model's attention is not finite; load it in a wider type (float32, float64)"
    ),
}
"""Numbers that overflowed and where, or profiles without any influence."""

METHODS = {
    "fitted_to_another": "{method} was fitted to another model, {difference}",
    "linear_layers_not_reached": (
        "{method}: {family} models have linear layers, which it does not reach; allowed are models with attention in "
        "every layer"
    ),
    "prompt_without_passages": "{method} needs prompts that list passages; this one lists none",
    "order_is_asked_for": "{method} rearranges passages, but here the right answer depends on their order",
    "first_layer_of_ms_poe": "ms_poe: first_layer must lie in [0, {depth}), got {first}",
    "turns_neighbours": (
        "{method}: {family} models turn neighbouring features; only half against half is allowed, as in llama, qwen2, "
        "qwen3, gemma3 and mistral"
    ),
    "no_rotary_positions": "{method}: {family} models have no rotary positions",
    "rope_of_length_under_method": (
        "{method}: the rope type {rope} takes its frequencies from the prompt's length; default, linear and llama3 are "
        "allowed"
    ),
    "turns_nothing": "{method}: this {family} model turns nothing by position",
    "no_mask": "{method}: attention {implementation!r} takes no mask; allowed are eager and sdpa",
    "heads_of_configuration": (
        "positional_channel: {family} models count their heads by the configuration; allowed are families that take "
        "what their projections give, such as llama, qwen2, qwen3, gemma3 and mistral"
    ),
    "projections_in_one_map": (
        "positional_channel: {family} makes queries, keys and values in one map; allowed are separate ones"
    ),
    "norms_of_heads": (
        "positional_channel: {family} normalises queries and keys over all heads, or each head in a way of its own; "
        "allowed are no norm and one for all heads"
    ),
    "learned_sinks_under_pine": "pine: {family} models have learned sinks; allowed are those without",
    "first_layer_of_calibration": "attention_calibration: first_layer must be below the {depth} layers, got {first}",
    "dummy_without_tokenizer": "attention_calibration: {because}; allowed is a dummy in token ids",
    "no_question_behind": "{method} repeats the question behind the last passage, and here none is",
    "adapter_of_quantised": "adapter: the weights of {model!r} are quantised; others are allowed",
    "no_targets_of_adapter": (
        "adapter: no layer of this {family} model has linear projections {missing} (experts of a mixture are none); "
        "allowed targets: {allowed}"
    ),
    "projections_packed": "{method}: {family} has no plain maps of queries, keys and values",
    "projection_not_linear": (
        "{family}: {path} is {module}, no linear projection with plain weights; allowed are Linear and Conv1D, "
        "unquantised"
    ),
    "adapter_not_fitted": "adapter: it is not fitted yet; give what fit returns, or the path of a recipe",
    "adapter_beside_recipe": (
        "adapter: its numbers lie beside its recipe; give what fit returns, or the path of a recipe"
    ),
    "method_behind_server": "{method} needs the model itself, not one behind a server",
}
"""Why a method against position bias cannot be applied."""

FITS = {
    "fit_behind_server": "{method} is fitted and needs the model itself, not one behind a server",
    "fit_without_samples": "{method} is fitted and needs calibration samples; got 0",
    "few_samples_for_fit": "{method} is fitted: {given} calibration samples given; at least {least} are needed",
    "fit_without_passages": "fit: {option} needs prompts that list passages, one of which holds the answer",
    "distractors_of_order": (
        "fit: distractors must be {kept!r} if the right answer depends on the order of passages, got {got!r}"
    ),
    "fewest_passages": "fit: fewest must be at most the {n_passages} passages of a prompt, got {fewest}",
    "fit_within_thoughts": "fit: {because}",
    "calibration_prompt_too_long": "fit: a calibration prompt has {longest} tokens; the model takes {most}",
    "from_question_without_passages": (
        "fit: from_question needs prompts with passages, and a tokenizer with character offsets"
    ),
    "from_question_at_end": ("fit: from_question needs prompts that go on after their last passage; one ends there"),
    "no_monotone_channel": "fit_channel: no channel is monotone in position in more than {layers} layers",
    "windows_of_channel_fit": ("fit_channel: windows of one length of {least} or more tokens are allowed, got {got}"),
}
"""Why its parameters cannot be found."""

ANSWERS = {
    "within_thoughts": (
        "the prompts end where the model's thoughts begin, and an answer would be scored within them; "
        "--template-options 'enable_thinking=False' closes them in templates that know it"
    ),
    "chat_repeats_nothing": "a chat server does not repeat prompts",
    "no_log_probabilities": "the server repeats no log-probabilities",
    "influence_within_thoughts": "there is no influence on the answer: {because}",
    "prompt_too_long": "{tokens} tokens and {following} of the answer; the model takes {most}",
    "all_too_long": "No example was answered: all {count} are too long for the model (the first: {first})",
    "none_answered": "No example was answered: all {count} were refused or are too long (the first: {first})",
}
"""Why there are no answers or scores."""

ENDINGS = {
    "loss_diverged": "the mean loss over steps {first} ... {last} was {loss}",
    "parameters_not_finite": "its parameters are not finite after step {step}",
}
"""Why the training of a member ended early."""

SENTENCES = {
    "bloom_rounds_alibi": (
        "BLOOM adds ALiBi in {dtype}: past position {exact} biases, and the logits they are added to, are rounded to "
        "whole steps; recomputed attention follows the rounding of the biases alone"
    ),
    "mpt_settings_ignored": (
        "transformers ignores this MPT's {settings}: its layers are causal, with ALiBi of maximum 8 and no other "
        "positions or norms"
    ),
    "falcon_alibi_twice": "Falcon's eager attention adds ALiBi twice; its sdpa attention adds it once",
    "falcon_alibi_slopes": (
        "Falcon divides its ALiBi slopes by sqrt(head_dim) = {root:g}: they are not the published ones"
    ),
    "falcon_alibi_bfloat16": (
        "Falcon builds ALiBi in bfloat16 whatever the weights: slopes keep 8 bits, and past position 256 the bias is a "
        "staircase"
    ),
    "yarn_positions": (
        "the configuration names {named:,} positions; YaRN stretches them to {stretched:,} (factor times original "
        "length), which are allowed"
    ),
    "linear_layers_not_counted": (
        "layers stand here for those with attention, in order: {counted} (from 0) of {depth}; linear layers, beside "
        "attention or in its place, and layers that mix no positions are not counted"
    ),
    "default_mixing": (
        "Mixing {mixing:g} in every layer is the default (--mixing): attention carries a tenth of each layer's update "
        "and the residual stream nine tenths; five published models have 0.06 to 0.14 on average."
    ),
    "rope_without_content": (
        "RoPE only turns content, and a rollout has none: the curve of {encoding} assumes queries and keys at an angle "
        "of {angle:g} radians (0: they point the same way) in every pair of features, with logit {logit:g} "
        "(rope(logit=..., angle=...)). Without content RoPE is the same as none; a model's own content differs by head "
        "and token."
    ),
    "bare_decays": (
        "linear layers enter by their decays at bare gates: what a token writes, and the layer's own input beside its "
        "state, are left out (power_rollout has them)"
    ),
    "large_logits": (
        "mean field: attention logits are large at this initialisation, and a network has few heads: a single one lies "
        "at least W1 {one:.3f} from the mean of all, the mean of {count} about {mean:.3f}, a flat line {flat:.3f}; a "
        "distance no larger than that is chance"
    ),
    # Memory.
    # Parts of a result that are missing, or are to be read with care.
    "message": "{text}",
    "theory_left_out": "{theory}: {because}",
    "architecture_without_description": "theories of the architecture: the model's family has no description",
    "mixing_without_description": "mixing: the model's family has no description",
    "precision_not_checked": "precision check: {because}",
    "path_not_converged": (
        "{kind}: on some prompts the path did not converge; do not use the profile where path_error is large"
    ),
    "mean_kernel_in_cells": "monotonicity of the mean kernel: it needs kernel_cells={kernel_cells}",
    "mean_content_not_kept": (
        "similarity of the mean content logits: they are kept up to a size, or with mean_content=True"
    ),
    "rollouts_beyond_attention": (
        "rollouts of attention: in some layers linear layers mix positions too, or nothing does"
    ),
    "power_of_normalised_stream": "power: the model normalises the stream itself, after adding to it",
    **INTERVENTIONS,
    **MODELS,
    **THEORIES,
    **NOT_FINITE,
    **METHODS,
    **FITS,
    **ANSWERS,
    **ENDINGS,
}
"""By the name of a caveat, with places for its numbers."""
