"""
A job whose parts are started by hand. `by_hand.train` is what its ranks run.
"""
