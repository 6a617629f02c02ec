"""What all tests share."""

import hypothesis

# Examples are judged by what they show, not by how long a busy machine takes for them.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")
