// What torch's autograd asks of a build with CUDA before it runs a backward on tensors that say they
// are on a GPU: streams that do nothing, and that there is such a device. Loaded ahead of torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <optional>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>);
}

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace at::accelerator {
// Takes the place of torch's own, which builds without CUDA answer with nothing.
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}
}  // namespace at::accelerator
