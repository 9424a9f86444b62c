from hypothesis import settings

# Arrays are slow to draw on a busy machine; what is tested is not how fast they are drawn.
settings.register_profile("qualms", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("qualms")
