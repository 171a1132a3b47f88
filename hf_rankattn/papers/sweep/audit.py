"""The audit: every numbered claim, theorem and figure of the papers, with the verdicts of the experiments."""

from collections.abc import Sequence

from ...report.verdicts import count_verdicts
from .judging import Claim


AMSEL = "Amsel, Yehudai and Bruna (2024), On the Benefits of Rank in Attention Layers"
DONG = "Dong, Cordonnier and Loukas (2021), Attention is not all you need"
BARRIER = "On the Limitation and Redundancy of Transformers: A Rank Perspective (submissions of 2025 and 2026)"
THIN = "Yao, Chen, Murtadha and Wang (2026), Thin Keys, Full Values"
OURS = "Beyond the papers"

# Paper -> statement, its number or place and a short summary -> what the `source` of each claim on it starts with. A statement
# without a claim has no source, and UNTESTED says why.
STATEMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    AMSEL: {
        "Fact 1: one full-rank head is enough": ("Amsel et al., Fact 1",),
        "Theorem 2: low-rank heads must be many": ("Amsel et al., Theorem 2",),
        "Theorem 4: exponential separation for biased neighbours": ("Amsel et al., Theorem 4",),
        "Theorem 7: two layers repair rank one for two points": ("Amsel et al., Theorem 7", "Amsel et al., Section 6"),
        "Conjecture 8: no fixed low-rank model for all N": ("Amsel et al., Conjecture 8",),
        "Figure: error against rank, by depth and budget": ("Amsel et al., error against rank",),
        "Figure: error against rank, by number of points": ("Amsel et al., context length",),
        "Figure: positional encodings": ("Amsel et al., positional encodings",),
        "Figure: learned bilinear forms": ("Amsel et al., learned forms",),
        "Figure: random features": ("Amsel et al., random features",),
        "Figure: the function u": ("Amsel et al., plot of u",),
        "In-context linear regression, and N = 32 (appendices of the later version)": (),
        "Code": ("Amsel et al., code",),
    },
    DONG: {
        "Theorem 2.1: the output is the sum of its paths": ("Dong et al., Theorem 2.1",),
        "Theorem 2.2: one layer cubes the residual": ("Dong et al., Theorem 2.2",),
        "Theorem 2.3: doubly exponential collapse, many heads": ("Dong et al., Theorem 2.3",),
        "Section 3: many paths, of which short ones carry the power": ("Dong et al., Section 3, paths",),
        "Claim 3.1: skips stop it": ("Dong et al., Claim 3.1",),
        "Corollary 3.2: MLPs slow it down": ("Dong et al., Corollary 3.2",),
        "Section 3: layer normalisation plays no role": ("Dong et al., Section 3, layer normalisation",),
        "Figure: sketch of paths": (),
        "Figure: path effectiveness": ("Dong et al., plot of path effectiveness",),
        "Figure: recurrent circle": ("Dong et al., recurrent circle",),
        "Figure: residuals in BERT, ALBERT and XLNet": ("Dong et al., plot of residuals",),
        "Figure: path lengths": ("Dong et al., plot of path lengths",),
        "Notebook: products of attention maps": ("Dong et al., notebook",),
        "Code": ("Dong et al., code",),
    },
    BARRIER: {
        "Theorem 1: the low-rank barrier": ("A Rank Perspective, Theorem 1",),
        "Lemma 1: softmax is near hardmax": ("A Rank Perspective, Lemma 1",),
        "Section 2.1: rank against head dimension": ("A Rank Perspective, Section 2.1",),
        "Model reduction: saturation from Omega(log n)": ("A Rank Perspective, model reduction",),
        "Accuracy saturates where rank does": ("A Rank Perspective, accuracy",),
        "The same for MLA": ("A Rank Perspective, MLA",),
        "Initialised models": ("A Rank Perspective, initialised models",),
        "Runs on IMDB, CIFAR-10, CIFAR-100 and SVHN": (),
        "Remarks of reviewers": ("A Rank Perspective, a reviewer",),
    },
    THIN: {
        "Selection needs O(log N) dimensions": ("Yao et al., O(log N)",),
        "Selection by position": ("Yao et al., selection by position",),
        "Retrieval by content": ("Yao et al., retrieval by content",),
        "Language models with thin keys": ("Yao et al., language models",),
    },
    OURS: {
        "Laws and measurements of this package": ("ours",),
        "Other papers": ("Lee, 2604.04384", "Maselko, 10.5281/zenodo.19422845"),
    },
}
UNTESTED = {
    "In-context linear regression, and N = 32 (appendices of the later version)": (
        "Neither text, code nor numbers were at hand; the tasks here are those of the code."
    ),
    "Figure: sketch of paths": "A drawing; nothing is measured in it.",
    "Runs on IMDB, CIFAR-10, CIFAR-100 and SVHN": (
        "They need downloads, and sizes and tolerances are not published: `head-dim-learning --dataset cifar10` "
        "runs the closest thing where there is a network, digits stand in without one."
    ),
}


def statement_of(claim: Claim) -> tuple[str, str]:
    """The paper and the statement that a claim is about."""
    for paper, statements in STATEMENTS.items():
        for statement, sources in statements.items():
            if claim.source.startswith(sources):
                return paper, statement
    raise ValueError(
        f"no statement of a paper has the source {claim.source!r}: add it to STATEMENTS, or name one of those."
    )


def audit_markdown(claims: Sequence[tuple[str, Claim]], complete: bool) -> str:
    """The number of each verdict, and one table of all claims, in the order of the statements.

    Args:
        claims: Pairs of the name of an experiment and a claim of it.
        complete: Whether every experiment has been run. Then a statement without a claim has a row with the reason.
    """
    of_claims = [statement_of(claim) for _, claim in claims]
    lines, untested = [], 0
    for paper, statements in STATEMENTS.items():
        rows = []
        for statement in statements:
            found = [pair for pair, of in zip(claims, of_claims, strict=True) if of == (paper, statement)]
            for name, claim in found:
                numbers = (claim.published, claim.measured, claim.verdict, claim.why)
                rows.append(row_of(statement, claim.claim, f"`{name}`", *numbers))
            if complete and not found:
                why = UNTESTED.get(statement, "No experiment of this run has a claim on it.")
                rows.append(row_of(statement, "", "", "", "", "not testable", why))
                untested += 1
        if rows:
            lines += [f"| **{paper}** | | | | | | |", *rows]
    header = count_verdicts(claim.verdict for _, claim in claims) + "."
    if untested:
        header += f" {untested} more rows are statements without an experiment; they are marked not testable, too."
    columns = "| statement | claim | `rankattn reproduce` | published | ours | verdict | why |"
    return "\n".join([header, "", columns, "|---" * 7 + "|", *lines]) + "\n"


def row_of(*cells: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") or "-" for text in cells) + " |"
