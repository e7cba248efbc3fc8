"""One iteration ("turn") of the flywheel, as library calls; `paceline turn` calls them.

    from paceline.loop.flywheel.config import read_config
    from paceline.loop.flywheel.run import turn
    result = turn(read_config(Path("flywheel.yaml")))       # result.passed, result.model, result.drafter

An iteration makes evals, a drafter, a smaller model and its drafter from recorded answers; the next one starts from the
answers of that model. `pricing.price` estimates its cost.
"""
