// Tensor arguments, and lists of them, of a boxed stable-ABI kernel, read with as few shim calls as the checks allow.
//
// torch::stable::Tensor holds a shared_ptr a tensor; on three lists of 64 tensors that costs a sixth of the op's host
// time, so the lists here own plain handles.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "torch/strides.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // not in torch 2.10
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace gmm {

// What is needed of one tensor. Sizes and strides are borrowed from it, and have `dim` elements.
struct TensorView {
  AtenTensorHandle handle;
  int64_t dim;
  int64_t *sizes;
  int64_t *strides;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;

  explicit TensorView(AtenTensorHandle tensor) : handle(tensor) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device_type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &device_index));
  }

  // Pointers are asked for once: a check and a description both want them, and each call of the C API costs.
  const void *data() const {
    if (!pointer_) STABLE_TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle, &pointer_));
    return pointer_;
  }

  bool empty() const { return std::count(sizes, sizes + dim, 0) > 0; }

  void *mutable_data() const {
    if (!mutable_pointer_) STABLE_TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle, &mutable_pointer_));
    return mutable_pointer_;
  }

  // For two dimensions. The C API takes A, B and D in one struct, so the pointer is not const; A and B are only read.
  Strided strided(const void *pointer) const {
    return {const_cast<void *>(pointer), sizes[0], sizes[1], strides[0], strides[1]};
  }

  // A reference of its own, for who takes it over.
  AtenTensorHandle new_reference() const {
    AtenTensorHandle copy;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &copy));
    return copy;
  }

  torch::stable::Tensor tensor() const { return torch::stable::Tensor(new_reference()); }

 private:
  mutable const void *pointer_ = nullptr;
  mutable void *mutable_pointer_ = nullptr;
};

// A Tensor or Tensor? of the stack. Owns it until its end, or until release().
class TensorArgument {
 public:
  static TensorArgument required(StableIValue value) {
    return TensorArgument(value, torch::stable::detail::to<AtenTensorHandle>(value), nullptr);
  }

  static TensorArgument optional(StableIValue value) {
    auto *box = torch::stable::detail::to<StableIValue *>(value);
    return TensorArgument(value, box ? torch::stable::detail::to<AtenTensorHandle>(*box) : nullptr, box);
  }

  TensorArgument(const TensorArgument &) = delete;
  TensorArgument &operator=(const TensorArgument &) = delete;

  ~TensorArgument() {
    if (!owned_) return;
    if (view_) aoti_torch_delete_tensor_object(view_->handle);
    delete box_;  // as in TensorList
  }

  // Gives the tensor up, to be put on another stack.
  StableIValue release() {
    owned_ = false;
    return value_;
  }

  bool present() const { return view_.has_value(); }
  const TensorView &operator*() const { return *view_; }
  const TensorView *operator->() const { return &*view_; }

 private:
  TensorArgument(StableIValue value, AtenTensorHandle handle, StableIValue *box) : value_(value), box_(box) {
    if (handle) view_.emplace(handle);
  }

  StableIValue value_;
  StableIValue *box_;
  std::optional<TensorView> view_;
  bool owned_ = true;
};

// Holds Python's lock, where there is a Python. Who lets go of the last C++ reference to a tensor takes the lock, and
// the dispatcher has given it back during a call: to take it once for a list spares 64 groups 9 us of 49 (CPU of two
// cores). Found at run time, as this library is for every Python and for none.
class PythonLock {
 public:
  PythonLock() : held_(ensure() != nullptr) {
    if (held_) state_ = ensure()();
  }
  ~PythonLock() {
    if (held_) release()(state_);
  }
  PythonLock(const PythonLock &) = delete;
  PythonLock &operator=(const PythonLock &) = delete;

 private:
  template <class Function>
  static Function find(const char *name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }

  static int (*ensure())() {
    static const auto function = [] {
      const auto is_initialized = find<int (*)()>("Py_IsInitialized");
      return is_initialized && is_initialized() ? find<int (*)()>("PyGILState_Ensure") : nullptr;
    }();
    return function;
  }

  static void (*release())(int) {
    static const auto function = find<void (*)(int)>("PyGILState_Release");
    return function;
  }

  const bool held_;
  int state_ = 0;
};

// A Tensor[] or Tensor[]? of the stack. Owns its tensors until its end, or until release().
class TensorList {
 public:
  static TensorList required(StableIValue value) {
    return TensorList(value, torch::stable::detail::to<StableListHandle>(value), nullptr);
  }

  static TensorList optional(StableIValue value) {
    auto *box = torch::stable::detail::to<StableIValue *>(value);
    return TensorList(value, box ? torch::stable::detail::to<StableListHandle>(*box) : nullptr, box);
  }

  static TensorList empty(size_t capacity) {
    StableListHandle list;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(capacity, &list));
    return TensorList(torch::stable::detail::from(list), list, nullptr);
  }

  TensorList(const TensorList &) = delete;
  TensorList &operator=(const TensorList &) = delete;

  ~TensorList() {
    if (!list_) return;
    const PythonLock lock;
    for (const TensorView &tensor : views_) aoti_torch_delete_tensor_object(tensor.handle);
    torch_delete_list(list_);
    delete box_;  // made by libtorch with new, as torch::stable does it for targets before 2.13
  }

  void push_back(const torch::stable::Tensor &tensor) {
    const StableIValue item = torch::stable::detail::from(tensor);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_push_back(list_, item));
    views_.emplace_back(torch::stable::detail::to<AtenTensorHandle>(item));
  }

  // Gives list and tensors up, to be put on a stack.
  StableIValue release() {
    list_ = nullptr;
    return value_;
  }

  bool present() const { return list_ != nullptr; }
  size_t size() const { return views_.size(); }
  const TensorView &operator[](size_t i) const { return views_[i]; }
  auto begin() const { return views_.begin(); }
  auto end() const { return views_.end(); }

 private:
  TensorList(StableIValue value, StableListHandle list, StableIValue *box) : value_(value), list_(list), box_(box) {
    if (!list) return;
    size_t size;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
    views_.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue item;
      STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
      views_.emplace_back(torch::stable::detail::to<AtenTensorHandle>(item));
    }
  }

  StableIValue value_;
  StableListHandle list_;
  StableIValue *box_;
  std::vector<TensorView> views_;
};

}  // namespace gmm
