"""The convolutional network: shapes, both norms, weights by name."""

import pytest
import torch

from instep.models.conv import SmallConvNet


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_logits_have_one_row_per_image(norm: str) -> None:
    model = SmallConvNet(num_classes=7, channels=1, norm=norm)
    assert model(torch.randn(3, 1, 28, 28)).shape == (3, 7)
    assert bool(list(model.buffers())) == (norm == "batch")


def test_a_width_is_a_convolution_after_which_images_are_half_as_large() -> None:
    model = SmallConvNet(num_classes=7, widths=(4, 8, 16))
    assert model.features(torch.randn(2, 3, 32, 32)).shape == (2, 16, 4, 4)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_with_group_norm_an_image_does_not_see_its_neighbours() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 8, 8)
    other = torch.cat([images[:1], torch.randn(3, 3, 8, 8)])
    group, batch = SmallConvNet(norm="group"), SmallConvNet(norm="batch")
    torch.testing.assert_close(group(images)[0], group(other)[0])
    assert not torch.allclose(batch(images)[0], batch(other)[0])


def test_weights_by_name_do_not_depend_on_order() -> None:
    models = SmallConvNet(), SmallConvNet()
    for model, direction in zip(models, (1, -1), strict=True):
        for name, parameter in list(model.named_parameters())[::direction]:
            model.init_parameter(name, parameter, torch.Generator().manual_seed(len(name)))
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_an_unknown_norm_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="batch, group, got 'layer'"):
        SmallConvNet(norm="layer")
