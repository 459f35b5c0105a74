"""The words of the report: what subjects, kinds, theories, metrics and statistics are called, and what they mean."""

SUBJECTS = {"trained": "as trained", "initialised": "at initialisation"}

KINDS = {
    "jacobian": "Jacobian",
    "probability": "probability gradient",
    "logprob": "log-probability gradient",
    "logit": "logit gradient",
    "fisher": "Fisher information",
    "integrated_gradients": "integrated gradients",
    "perturbation": "perturbation",
}

THEORIES = {
    "attention_only": "attention-only rollout",
    "rollout": "published residual rollout",
    "attention_rollout": "rollout of its own attention",
    "rollout_content": "residual rollout with content",
    "continuous": "continuous limit",
    "closed_form": "closed form",
    "power_rollout": "power rollout",
    "mean_field": "mean-field theory",
    "flat": "flat line",
}

ATTENTION_ROLLOUTS = {
    "rollout": "rollout, measured mixing",
    "attention_only": "attention only",
    "norm_weighted": "norm-weighted",
}

MIXINGS = {
    "frobenius": "Frobenius (paper)",
    "token_mean": "token mean (code)",
}

METRICS = {
    "wasserstein": "W1",
    "spearman": "rank correlation",
    "total_variation": "total variation",
    "symmetric_kl": "symmetric KL",
    "log_error": "log error",
    "minimum_shift": "minimum shift",
}

STATISTICS = {
    "first_tenth": "first tenth",
    "middle_tenth": "middle tenth",
    "last_tenth": "last tenth",
    "first_token": "first position",
    "last_token": "last position",
    "interior_primacy": "first tenth without first position",
    "interior_recency": "last tenth without last position",
    "first_over_middle": "first minus middle tenth",
    "last_over_middle": "last (its last position left out) minus middle tenth",
    "mean_position": "mean position",
    "minimum_position": "minimum at",
}

GLOSSARY = {
    "Influence": "How strongly the model's output at the last position reacts to a small change at each position of the"
    " context. All positions together make 100 %: this is the profile that is drawn.",
    "Flat line": "The profile in which every position weighs the same, 1/N. A theory is worth something only if it"
    " is closer to the measurement than this.",
    "First, middle, last tenth": "The share of the influence that falls on the first 10 % of the context, on the 10 %"
    " around its centre, and on the last 10 %. A flat line has 10 % in each.",
    "Primacy, recency": "More influence at the beginning, or at the end, than a flat line has. The last position itself"
    " is listed apart, because residual connections alone give it a share.",
    "W1": "Wasserstein-1 distance: the share of influence that must be moved, times how far (as a fraction of the"
    " context), to turn one profile into the other. 0 means identical; 0.1 is large: a tenth of"
    " the influence, moved from one end to the other.",
    "A flat line's distance": "W1 from a flat line to the same measurement: what a theory that knows nothing reaches.",
    "Between halves of the texts": "W1 between the profiles of two random halves of the texts: how well the measurement"
    " agrees with itself. The average of all texts is about twice as near to the truth.",
    "To single texts": "The median W1 from the theory to the profile of one text, instead of to the average of all.",
    "Interval": "In brackets, the 95 % interval over texts, which are the prompts, or over initialisation seeds: where"
    " the number would lie with other ones. Each interval stands alone; of twenty comparisons about one misses by"
    " chance. None is printed if nothing is known, as with a single text.",
    "Against a flat line": "Closer, farther or undecided: whether the interval of the theory's W1 less the flat line's,"
    " on the same texts, lies below zero, above zero, or around it. Named are other distances that rank the two the"
    " other way round. With fewer than 6 independent texts or seeds nothing is decided.",
    "Jacobian": "The size of the derivative of the last hidden state (after the final norm) by an input embedding.",
    "Probability gradient": "The size of the derivative of the predicted token's probability by an input embedding.",
    "Mixing": "How much of a layer's output at a position comes through attention from all positions rather than"
    " straight through the residual connection: 0 is none, 1 is all. Two published definitions: norms over the whole"
    " sequence (Frobenius, as in the paper), or the mean over tokens of each token's share (as in its code).",
    "At initialisation": "The same configuration with freshly drawn random weights: what the architecture does before"
    " any training.",
    "Rank correlation": "Spearman's coefficient over positions. Two falling curves have a high one whatever their"
    " shape, so it is never read alone.",
    "Log error": "Median over positions of the absolute difference of the logarithms: 0.1 means that half of the"
    " positions are within 10 %, small influences counted like large ones.",
    "Total variation": "The share of influence that sits at other positions in one profile than in the other.",
    "Symmetric KL": "Mean of the two Kullback-Leibler divergences, in nats; a dash if one profile has a zero that"
    " the other has not.",
    "Attention-only rollout": "The published theory without residual connections: the product of all layers' attention"
    " matrices, as the architecture has them (Wu et al. 2025).",
    "Published residual rollout": "Layer by layer, a mixture of attention and of the residual path; the product of all"
    " layers says where influence goes (arXiv 2602.16837).",
    "Continuous limit": "The same theory for very long contexts, as a function of the relative position (arXiv"
    " 2603.10123).",
    "Mean-field theory": "Our theory for random weights, from the configuration alone and without a free parameter; it"
    " says nothing of trained weights, and so stands beside the initialisation only.",
    "Rollout of its own attention": "The same product with the attention that the model really shows on the prompt in"
    " place of the one its architecture suggests.",
    "Power rollout": "Our theory for trained models. It is given the model's own attention and derivatives on the same"
    " prompts, where the published theories are given the architecture. Squared attention weights and squared local"
    " derivatives are added up, because contributions of different paths have unrelated directions.",
}

ATTENTION_GLOSSARY = {
    "Interval": "In brackets, the 95 % interval over prompts; none with a single prompt.",
    "Distance": "How many positions back a query's attention lies on average, over queries, heads and prompts. Even"
    " attention spreads equally over all keys that the mask lets a query see.",
    "Entropy": "Of each query's attention, divided by its largest possible value. 1 is even, 0 a single key.",
    "Sink": "A position that takes more than a threshold of the attention of the queries that see it. Of the last"
    " positions only few queries speak.",
    "Learned sink": "In GPT-OSS, a place of each head's softmax that is no position and passes nothing on. Its share is"
    " listed if there is one; distance and entropy are those of the rest.",
    "Content logits": "Query times key times the model's scale, without positions: before rotation, ALiBi and soft cap."
    " Diagonal: a token with itself; off-diagonal: with the tokens before it. The published measurement leaves the"
    " scale out, which is why both are listed.",
    "Similarity": "1 - entropy / log(199) of a histogram over 199 bins between the 0.5 % and 99.5 % quantiles of all"
    " content logits of the model. The published number is that of the mean over prompts.",
    "Mixing": "How large the attention branch is beside the stream it is added to: 0 is none, 1 is all.",
    "Prefix-monotone": "Each query gives the first k + 1 keys no more attention than the query before it does, for"
    " every k. Theories of primacy assume it; counted is how often it fails, and by how much.",
    "Rollouts": "Layer by layer, attention is multiplied up into one influence per position. Measured mixing: a layer"
    " stands still with one minus its mixing. Attention only: it never does. Norm-weighted: attention times the length"
    " of what it moves (Kobayashi et al. 2020), rows normalised, with measured mixing. Power: squared attention with"
    " each head's gain, energies added up, without MLPs.",
}


def label(names: dict[str, str], name: str) -> str:
    """The report's word for a name; the name itself with spaces if there is none."""
    return names.get(name, name.replace("_", " "))
