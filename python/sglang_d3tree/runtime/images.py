"""An image that does not reach the model is the request's error: 400, never a shorter prompt.

SGLang's processors pair images with the placeholders they find in the prompt. An image without a placeholder, or one
sent to a model without a vision tower, is left out without a word, and the answer is about nothing.
"""

from __future__ import annotations

from typing import Any


def around_load_image(original: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang blames itself (500) for a file that is not there or a decoder that stumbles; the request is at fault."""
    try:
        return original(*args, **kwargs)
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"the image cannot be read: {error}") from error


def check_images_used(image_data: Any, multimodal_inputs: Any) -> None:
    """Compare the images of one request with what its processor made of them.

    Args:
        image_data: the request's images, as SGLang's ``GenerateReqInput`` holds them for a single prompt.
        multimodal_inputs: SGLang's ``MultimodalProcessorOutput``, or None when no processor ran.

    Raises:
        ValueError: SGLang answers 400 with the sentence.
    """
    given = _count(image_data)
    if given == 0:
        return
    used = _count_used(multimodal_inputs)
    if used < given:
        raise ValueError(
            f"The request brings {given} image{'s' * (given > 1)}, but the prompt has a place for {used}: put one "
            "image placeholder of the model's chat template into the text for every image (/v1/chat/completions "
            "does it), and check that --model-path is a model with vision."
        )


def _count(image_data: Any) -> int:
    if image_data is None:
        return 0
    if isinstance(image_data, list):
        return sum(_count(item) for item in image_data)
    return 1


def _count_used(multimodal_inputs: Any) -> int:
    items = getattr(multimodal_inputs, "mm_items", None) or []
    # One item may hold several images; each has its own range of prompt positions.
    return sum(len(item.offsets or []) for item in items if item.is_image())
